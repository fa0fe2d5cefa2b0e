// Fenced memory for torch's CPU tensors: every posix_memalign block ends at a page that cannot be touched, and a freed block can never be
// touched again.  A use after free, or a write behind the end, ends the process at the line that does it (PYTHONFAULTHANDLER=1 shows it).
//
// The kernel does not fault on such memory, it returns EFAULT, which a backend takes for a broken connection: so what is read from or
// written to descriptors is looked at first.
//
// Each live block is two mappings: raise vm.max_map_count.  GUARD_MIN: the least bytes of a block that is fenced (default 16).
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#define PAGE 4096UL
#define ARENA (1UL << 44)  // addresses, not memory
#define REAL(name) ((__typeof__(name) *)find(&real_##name, #name))

static char *arena;
static atomic_ulong top;
static size_t least = 16;
static void *real_free, *real_posix_memalign, *real_malloc_usable_size, *real_realloc;
static void *real_read, *real_readv, *real_recv, *real_recvmsg, *real_write, *real_writev, *real_send, *real_sendmsg;

static void *find(void **known, const char *name) {
    if (!*known) *known = dlsym(RTLD_NEXT, name);
    return *known;
}

__attribute__((constructor)) static void start(void) {
    const char *min = getenv("GUARD_MIN");
    if (min) least = strtoul(min, 0, 10);
    char *got = mmap(0, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got != MAP_FAILED) arena = got;
}

static int is_ours(const void *p) { return arena && (const char *)p >= arena && (const char *)p < arena + ARENA; }

// ---- blocks: a page that holds the size, the body, a page that cannot be touched ----

int posix_memalign(void **out, size_t alignment, size_t size) {
    if (!arena || alignment > PAGE || alignment < 64 || size < least) return REAL(posix_memalign)(out, alignment, size);
    size_t padded = (size + alignment - 1) / alignment * alignment;
    size_t body = (padded + PAGE - 1) / PAGE * PAGE;
    size_t whole = body + 2 * PAGE;
    size_t at = atomic_fetch_add(&top, whole);
    if (at + whole > ARENA) return ENOMEM;
    char *base = arena + at;
    if (mprotect(base, PAGE + body, PROT_READ | PROT_WRITE)) return REAL(posix_memalign)(out, alignment, size);
    *(size_t *)base = whole;
    char *user = base + PAGE + body - padded;
    *(char **)(base + 8) = user;
    memset(user, 0xA5, padded);
    *out = user;
    return 0;
}

static char *base_of(void *p) {
    return (char *)((uintptr_t)p & ~(PAGE - 1)) - PAGE;  // the body's first page holds its start: padded > body - PAGE
}

void free(void *p) {
    if (!is_ours(p)) { REAL(free)(p); return; }
    char *base = base_of(p);
    if (*(char **)(base + 8) != p) { fprintf(stderr, "guard: free of %p, which is no block\n", p); abort(); }
    size_t whole = *(size_t *)base;
    madvise(base + PAGE, whole - 2 * PAGE, MADV_DONTNEED);
    mprotect(base, whole - PAGE, PROT_NONE);
}

void *realloc(void *p, size_t size) {
    if (is_ours(p)) { fprintf(stderr, "guard: realloc of %p, which is an aligned block\n", p); abort(); }
    return REAL(realloc)(p, size);
}

size_t malloc_usable_size(void *p) {
    if (!is_ours(p)) return REAL(malloc_usable_size)(p);
    char *base = base_of(p);
    return (size_t)(base + *(size_t *)base - PAGE - (char *)p);
}

// ---- what the kernel reads and writes for us ----

static int can_touch(const void *p) {
    char byte;
    struct iovec mine = {&byte, 1}, there = {(void *)p, 1};
    return process_vm_readv(getpid(), &mine, 1, &there, 1, 0) == 1 || errno != EFAULT;
}

static void look(const char *what, const void *p, size_t size) {
    if (!size || !is_ours(p)) return;
    int kept = errno;
    if (!can_touch(p) || !can_touch((const char *)p + size - 1)) {
        fprintf(stderr, "guard: %s of %zu bytes at %p: freed memory, or behind the end of a block\n", what, size, p);
        abort();
    }
    errno = kept;
}

static void look_all(const char *what, const struct iovec *parts, size_t count) {
    for (size_t i = 0; i < count; i++) look(what, parts[i].iov_base, parts[i].iov_len);
}

ssize_t read(int fd, void *p, size_t n) { look("read", p, n); return REAL(read)(fd, p, n); }
ssize_t recv(int fd, void *p, size_t n, int flags) { look("recv", p, n); return REAL(recv)(fd, p, n, flags); }
ssize_t write(int fd, const void *p, size_t n) { look("write", p, n); return REAL(write)(fd, p, n); }
ssize_t send(int fd, const void *p, size_t n, int flags) { look("send", p, n); return REAL(send)(fd, p, n, flags); }
ssize_t readv(int fd, const struct iovec *v, int n) { look_all("readv", v, (size_t)n); return REAL(readv)(fd, v, n); }
ssize_t writev(int fd, const struct iovec *v, int n) { look_all("writev", v, (size_t)n); return REAL(writev)(fd, v, n); }
ssize_t recvmsg(int fd, struct msghdr *m, int flags) { look_all("recvmsg", m->msg_iov, m->msg_iovlen); return REAL(recvmsg)(fd, m, flags); }
ssize_t sendmsg(int fd, const struct msghdr *m, int flags) { look_all("sendmsg", m->msg_iov, m->msg_iovlen); return REAL(sendmsg)(fd, m, flags); }
