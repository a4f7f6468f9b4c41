/* Preloaded into the programs of iptables where this process has no CAP_NET_RAW (preload.py).
 *
 * They ask the kernel by socket options, of netfilter's and of ipset's, for which the kernel demands CAP_NET_ADMIN and any
 * internet socket; but they open a raw one for it, which demands CAP_NET_RAW. Nothing is ever sent through that socket. So a
 * datagram socket takes its place. It is an extension module in name only: that has pip compile it.
 */
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FLAGS (SOCK_CLOEXEC | SOCK_NONBLOCK)

int socket(int domain, int type, int protocol) {
    if ((domain == AF_INET || domain == AF_INET6) && (type & ~FLAGS) == SOCK_RAW && protocol == IPPROTO_RAW) {
        type = SOCK_DGRAM | (type & FLAGS);
        protocol = 0;
    }
    return (int)syscall(SYS_socket, domain, type, protocol);
}
