/* scripts/kernel loads this into user-mode Linux if the processor's extended registers are larger than its buffer.
 *
 * User-mode Linux 6.1 reads and writes 2,696 bytes of a process's extended registers: all of AVX-512. A processor with AMX has
 * 8 KiB more, and the host refuses to write a part (xstateregs_set, arch/x86/kernel/fpu/regset.c), so the guest's first process
 * dies. This library adds the missing bytes as zeros: no process uses AMX before it has requested it (arch_prctl(2)).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/uio.h>

typedef long ptrace_function(int request, pid_t pid, void *address, void *data);

/* Static, because the stacks that call this have 16 KiB. User-mode Linux has one thread that calls ptrace. */
static char registers[1 << 16];
static size_t registers_size;
static ptrace_function *next;

static void __attribute__((constructor)) find_next(void)
{
	next = (ptrace_function *)dlsym(RTLD_NEXT, "ptrace");
}

static int learn_size(pid_t pid, void *kind)
{
	struct iovec all = { registers, sizeof(registers) };

	if (next(PTRACE_GETREGSET, pid, kind, &all) < 0)
		return -1;
	memset(registers, 0, sizeof(registers));
	registers_size = all.iov_len;
	return 0;
}

long ptrace(enum __ptrace_request request, ...)
{
	va_list arguments;
	pid_t pid;
	void *address, *data;

	va_start(arguments, request);
	pid = va_arg(arguments, pid_t);
	address = va_arg(arguments, void *);
	data = va_arg(arguments, void *);
	va_end(arguments);
	if (request == PTRACE_SETREGSET && (long)address == NT_X86_XSTATE) {
		struct iovec *given = data;
		struct iovec all;

		if (!registers_size && learn_size(pid, address) < 0)
			return -1;
		if (given->iov_len < registers_size) {
			memcpy(registers, given->iov_base, given->iov_len);
			all.iov_base = registers;
			all.iov_len = registers_size;
			return next(request, pid, address, &all);
		}
	}
	return next(request, pid, address, data);
}
