/* A library that is preloaded into the programs of iptables if this process has no CAP_NET_RAW (process.py).
 *
 * The programs of iptables send requests to netfilter and ipset by socket options. For these requests, the kernel requires
 * CAP_NET_ADMIN, and any internet socket. However, the programs open a raw socket, for which the kernel requires CAP_NET_RAW.
 * The programs never send a packet through the raw socket, so this library opens a datagram socket instead.
 *
 * The library is declared as an extension module of Python only so that pip compiles the library.
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
