// Every block of the heap, small ones of C++ and Python included: freed blocks are filled with a pattern and kept for a while.  A write to
// one, by anybody, the kernel included, and a write behind the end of a block end the process with a report that names the block and
// who allocated and freed it; so does a block that is freed twice.
//
// HEAP_KEEP: how many MiB of freed blocks are kept (default 256).  HEAP_STACKS=1: record stacks (several times slower).
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <unwind.h>

extern void *__libc_malloc(size_t);
extern void __libc_free(void *);
extern void *__libc_memalign(size_t, size_t);

#define DEPTH 10
#define LIVE 0x11FEB10C11FEB10CULL
#define DEAD 0xDEADB10CDEADB10CULL
#define FILL 0xDB
#define FILLED 0xDBDBDBDBDBDBDBDBULL
#define FENCE 0xCB
#define FENCE_BYTES 32
#define MOST_FILLED (256UL << 10)  // of a block; the rest of a larger one is not looked at
#define MOST_KEPT (1UL << 21)

typedef struct {  // in front of every block; a multiple of 16 bytes
    uint64_t size;
    void *raw;
    void *allocated[DEPTH], *freed[DEPTH];
    uint64_t unused, state;
} Header;

static Header *kept[MOST_KEPT];
static size_t first, count, bytes, limit = 256UL << 20;
static int has_stacks;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int is_ours;  // this thread walks its stack or reports: it may hold the lock, so what it frees stays allocated

static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork(void) { pthread_mutex_unlock(&lock); }

__attribute__((constructor)) static void start(void) {
    const char *value = getenv("HEAP_KEEP");
    if (value) limit = strtoul(value, 0, 10) << 20;
    has_stacks = getenv("HEAP_STACKS") != 0;
    pthread_atfork(before_fork, after_fork, after_fork);
}

// ---- stacks and reports ----

typedef struct { void **found; int depth, skip; } Walk;

static _Unwind_Reason_Code step(struct _Unwind_Context *context, void *given) {
    Walk *walk = given;
    if (walk->skip-- > 0) return _URC_NO_REASON;
    if (walk->depth == DEPTH) return _URC_END_OF_STACK;
    walk->found[walk->depth++] = (void *)_Unwind_GetIP(context);
    return _URC_NO_REASON;
}

static void record(void **found) {
    memset(found, 0, DEPTH * sizeof *found);
    if (!has_stacks || is_ours) return;
    is_ours = 1;
    Walk walk = {found, 0, 2};
    _Unwind_Backtrace(step, &walk);
    is_ours = 0;
}

static void show(const char *what, void **stack) {
    if (!stack[0]) return;
    dprintf(2, "  %s\n", what);
    for (int i = 0; i < DEPTH && stack[i]; i++) {
        Dl_info info = {0};
        dladdr(stack[i], &info);
        dprintf(2, "    %s+0x%zx %s\n", info.dli_fname ? info.dli_fname : "?", (size_t)((char *)stack[i] - (char *)info.dli_fbase),
                info.dli_sname ? info.dli_sname : "");
    }
}

static void report(const char *what, Header *header, size_t at) {
    is_ours = 1;
    const unsigned char *user = (const unsigned char *)(header + 1);
    size_t start = at & ~7UL;
    dprintf(2, "guard: %s: block %p of %zu bytes, at byte %zu:", what, (void *)user, (size_t)header->size, at);
    for (size_t i = start; i < start + 32 && i < header->size + FENCE_BYTES; i++) dprintf(2, " %02x", user[i]);
    dprintf(2, "\n");
    if (!has_stacks) dprintf(2, "  run again with HEAP_STACKS=1 to see who allocated and freed it\n");
    show("allocated", header->allocated);
    show("freed", header->freed);
    abort();
}

// ---- blocks ----

static void check_end(Header *header) {
    const unsigned char *end = (const unsigned char *)(header + 1) + header->size;
    for (size_t i = 0; i < FENCE_BYTES; i++)
        if (end[i] != FENCE) report("write behind the end", header, header->size + i);
}

static void check_freed(Header *header) {
    const unsigned char *user = (const unsigned char *)(header + 1);
    size_t size = header->size < MOST_FILLED ? header->size : MOST_FILLED, i = 0;
    if (header->state != DEAD) report("write in front of a freed block", header, 0);
    for (uint64_t word; i + 8 <= size; i += 8) {
        memcpy(&word, user + i, 8);
        if (word != FILLED) break;
    }
    for (; i < size; i++)
        if (user[i] != FILL) report("write to freed memory", header, i);
    check_end(header);
}

static void *allocate(size_t alignment, size_t size) {
    if (alignment < 16) alignment = 16;
    size_t front = (sizeof(Header) + alignment - 1) / alignment * alignment;
    if (size > SIZE_MAX - front - FENCE_BYTES) { errno = ENOMEM; return 0; }
    size_t whole = front + size + FENCE_BYTES;
    char *raw = alignment == 16 ? __libc_malloc(whole) : __libc_memalign(alignment, whole);
    if (!raw) { errno = ENOMEM; return 0; }
    Header *header = (Header *)(raw + front) - 1;
    header->size = size, header->raw = raw, header->state = LIVE;
    record(header->allocated);
    memset(header->freed, 0, sizeof header->freed);
    memset(raw + front + size, FENCE, FENCE_BYTES);
    return raw + front;
}

static void forget(void *p) {
    Header *header = (Header *)p - 1, *old[8];
    if (header->state == DEAD) report("freed twice", header, 0);
    if (header->state != LIVE) { dprintf(2, "guard: free of %p, which is no block, or has been written in front of\n", p); abort(); }
    check_end(header);
    record(header->freed);
    header->state = DEAD;
    memset(p, FILL, header->size < MOST_FILLED ? header->size : MOST_FILLED);
    int num_old = 0;
    pthread_mutex_lock(&lock);
    kept[(first + count++) % MOST_KEPT] = header;
    bytes += header->size + sizeof *header;
    while (num_old < 8 && count && (bytes > limit || count > MOST_KEPT - 16)) {
        Header *oldest = old[num_old++] = kept[first];
        first = (first + 1) % MOST_KEPT, count--;
        bytes -= oldest->size + sizeof *oldest;
    }
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < num_old; i++) {
        check_freed(old[i]);
        old[i]->state = 0;
        __libc_free(old[i]->raw);
    }
}

// Looks at all freed blocks that are kept: tests may call it, and every process does at its end.
__attribute__((destructor)) void guard_check(void) {
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < count; i++) check_freed(kept[(first + i) % MOST_KEPT]);
    pthread_mutex_unlock(&lock);
}

// ---- the C library's names ----

void *malloc(size_t size) { return allocate(16, size); }
void free(void *p) { if (p && !is_ours) forget(p); }
void *aligned_alloc(size_t alignment, size_t size) { return allocate(alignment, size); }
void *memalign(size_t alignment, size_t size) { return allocate(alignment, size); }
void *valloc(size_t size) { return allocate(4096, size); }
void *pvalloc(size_t size) { return allocate(4096, (size + 4095) & ~4095UL); }
size_t malloc_usable_size(void *p) { return p ? ((Header *)p - 1)->size : 0; }

int posix_memalign(void **out, size_t alignment, size_t size) {
    void *got = allocate(alignment, size);
    if (!got) return ENOMEM;
    *out = got;
    return 0;
}

void *calloc(size_t number, size_t each) {
    size_t size;
    if (__builtin_mul_overflow(number, each, &size)) { errno = ENOMEM; return 0; }
    void *got = allocate(16, size);
    return got ? memset(got, 0, size) : 0;
}

void *realloc(void *p, size_t size) {
    if (!p) return allocate(16, size);
    if (!size) { forget(p); return 0; }
    Header *header = (Header *)p - 1;
    if (header->state != LIVE) { dprintf(2, "guard: realloc of %p, which is no block\n", p); abort(); }
    void *got = allocate(16, size);
    if (!got) return 0;
    memcpy(got, p, header->size < size ? header->size : size);
    forget(p);
    return got;
}
