/* Counts, records and faults the file system calls of one process below one folder.
 *
 * Preloaded into a Python process (see preload.py). Every call that touches a path below the armed folder gets
 * the next place in the run's sequence; at the armed place the process is killed, or the call fails with an
 * errno, or a write is cut short, or the process stops after the call. Calls are recorded with what they did
 * (and, when asked, with the bytes they wrote) in a region that is shared with the parent across fork.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { KILL = 1, ERRNO = 2, SHORT = 3, STOP = 4 };
enum { WRITES = 1 };

struct region {
    uint64_t size;
    _Atomic uint64_t used;     /* bytes of records, from `records` on */
    _Atomic uint64_t sequence; /* calls so far */
    _Atomic uint64_t fired;    /* faults that took place */
    uint64_t armed;            /* 0: pass everything through, uncounted */
    uint64_t at;               /* place in the sequence that is faulted; 0: none */
    uint64_t action, error;
    uint64_t sticky;           /* an errno stays: later calls that write fail as well */
    uint64_t keep_data;        /* record the bytes of writes */
    uint64_t stop_op;          /* with STOP: at every call of this name, not at one place */
    char stop_name[24];
    char root[4096];
    char records[];
};

struct record {
    uint32_t size;
    uint32_t writes;
    uint64_t sequence;
    int64_t result;
    int64_t error;
    uint64_t inode;
    int64_t offset;
    uint32_t path_bytes, other_bytes;
    uint64_t data_bytes;
    char op[24];
    char tail[]; /* path, other path, data */
};

static struct region *shared;

__attribute__((constructor)) static void set_up(void) {
    uint64_t size = 64u << 20;
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return;
    shared = memory;
    shared->size = size;
}

/* For Python: where the region is, and where its records begin. */
void *chaos_region(void) { return shared; }
uint64_t chaos_records_offset(void) { return offsetof(struct region, records); }

struct call {
    int counted;
    int error;   /* fail with this errno */
    int cut;     /* write only half */
    int stop;
    uint32_t writes;
    uint64_t sequence;
    const char *op;
    char path[PATH_MAX], other[PATH_MAX];
};

static int below(const char *path) {
    size_t n = strlen(shared->root);
    return !strncmp(path, shared->root, n) && (path[n] == 0 || path[n] == '/');
}

static int path_of_fd(int fd, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, out, PATH_MAX - 1);
    if (n <= 0) return 0;
    out[n] = 0;
    return out[0] == '/';
}

static int path_at(int dir, const char *path, char *out) {
    if (!path) return 0;
    if (path[0] == '/') {
        snprintf(out, PATH_MAX, "%s", path);
        return 1;
    }
    char base[PATH_MAX];
    if (dir == AT_FDCWD) {
        if (!getcwd(base, sizeof base)) return 0;
    } else if (!path_of_fd(dir, base)) {
        return 0;
    }
    if (strlen(base) + strlen(path) + 2 > PATH_MAX) return 0;
    strcpy(out, base);
    strcat(out, "/");
    strcat(out, path);
    return 1;
}

static int armed(void) { return shared && shared->armed; }

/* A fault that stays: space and files that cannot be written refuse what adds to them, and a lost medium all. */
static int stays(const char *op, uint32_t writes) {
    if (!shared->sticky || !writes || !strcmp(op, "close-written") || !strcmp(op, "flock")) return 0;
    return shared->error != ENOSPC || (strcmp(op, "unlink") && strcmp(op, "rmdir"));
}

/* Give the call its place, and fault it if it is its turn. */
static void place(struct call *c, const char *op, uint32_t writes, int64_t count) {
    c->op = op;
    c->writes = writes;
    c->counted = 1;
    c->sequence = atomic_fetch_add(&shared->sequence, 1) + 1;
    if (shared->action == STOP && shared->stop_op) {
        c->stop = !strcmp(op, shared->stop_name);
        return;
    }
    int mine = shared->at && c->sequence == shared->at;
    int later = shared->at && c->sequence > shared->at && stays(op, writes);
    if (!mine && !later) return;
    if (shared->action == KILL) {
        atomic_fetch_add(&shared->fired, 1);
        syscall(SYS_kill, getpid(), SIGKILL);
        for (;;) pause();
    }
    if (shared->action == ERRNO) {
        c->error = (int)shared->error;
        if (mine) atomic_fetch_add(&shared->fired, 1);
    }
    if (shared->action == SHORT && count > 1) {
        c->cut = 1;
        atomic_fetch_add(&shared->fired, 1);
    }
}

static void note(struct call *c, int64_t result, uint64_t inode, int64_t offset, const void *data, int64_t bytes) {
    int error = errno;
    if (!c->counted) return;
    uint64_t kept = shared->keep_data && data && bytes > 0 ? (uint64_t)bytes : 0;
    uint32_t path_bytes = (uint32_t)strlen(c->path), other_bytes = (uint32_t)strlen(c->other);
    uint64_t size = (sizeof(struct record) + path_bytes + other_bytes + kept + 15) & ~7ull;
    uint64_t at = atomic_fetch_add(&shared->used, size);
    if (at + size + sizeof(struct region) <= shared->size) {
        struct record *r = (struct record *)(shared->records + at);
        r->writes = c->writes;
        r->sequence = c->sequence;
        r->result = result;
        r->error = result < 0 ? error : 0;
        r->inode = inode;
        r->offset = offset;
        r->path_bytes = path_bytes;
        r->other_bytes = other_bytes;
        r->data_bytes = kept;
        snprintf(r->op, sizeof r->op, "%s", c->op);
        memcpy(r->tail, c->path, path_bytes);
        memcpy(r->tail + path_bytes, c->other, other_bytes);
        if (kept) memcpy(r->tail + path_bytes + other_bytes, data, kept);
        atomic_thread_fence(memory_order_release);
        r->size = (uint32_t)size;
    }
    if (c->stop) {
        atomic_fetch_add(&shared->fired, 1);
        syscall(SYS_kill, getpid(), SIGSTOP);
    }
    errno = error;
}

/* A line of the program's own among the records: what it has promised by now. */
void chaos_mark(const char *text) {
    if (!armed()) return;
    struct call c = {.counted = 1, .op = "mark", .sequence = atomic_load(&shared->sequence)};
    snprintf(c.path, sizeof c.path, "%s", text);
    note(&c, 0, 0, 0, NULL, 0);
}

static uint64_t inode_of_fd(int fd) {
    struct stat s;
    return fstat(fd, &s) ? 0 : (uint64_t)s.st_ino;
}

static uint64_t inode_of_path(int dir, const char *path) {
    struct stat s;
    return fstatat(dir, path, &s, AT_SYMLINK_NOFOLLOW) ? 0 : (uint64_t)s.st_ino;
}

#define NEXT(type, name, ...)                            \
    static type (*next)(__VA_ARGS__);                    \
    if (!next) next = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

/* A call on a descriptor or a path: `use` fills in the paths, `act` is the real call. */
#define ON(target, opname, opwrites, opcount)                                     \
    struct call c = {0};                                                         \
    if (armed() && (target) && (below(c.path) || (c.other[0] && below(c.other)))) \
        place(&c, opname, opwrites, opcount)
#define FAILS(value)      \
    if (c.error) {        \
        errno = c.error;  \
        result = (value); \
    } else

/* ---- opening and closing ---- */
static int open_flags_write(int flags) {
    return (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC));
}
#define OPEN_BODY(dir, path, call_it)                                                                     \
    ON(path_at(dir, path, c.path), open_flags_write(flags) ? (flags & O_CREAT ? "create" : "open-write")   \
                                                           : (flags & O_DIRECTORY ? "open-folder" : "open-read"), \
       open_flags_write(flags) ? WRITES : 0, 0);                                                          \
    int result;                                                                                           \
    FAILS(-1) result = call_it;                                                                           \
    note(&c, result, result >= 0 && c.counted ? inode_of_fd(result) : 0, flags, NULL, 0);                  \
    return result;
#define MODE_ARGUMENT                                     \
    mode_t mode = 0;                                      \
    if (flags & (O_CREAT | O_TMPFILE)) {                  \
        va_list list;                                     \
        va_start(list, flags);                            \
        mode = va_arg(list, mode_t);                      \
        va_end(list);                                     \
    }
#define OPEN(name)                                        \
    int name(const char *path, int flags, ...) {          \
        MODE_ARGUMENT                                     \
        NEXT(int, name, const char *, int, ...);          \
        OPEN_BODY(AT_FDCWD, path, next(path, flags, mode)) \
    }
#define OPENAT(name)                                          \
    int name(int dir, const char *path, int flags, ...) {     \
        MODE_ARGUMENT                                         \
        NEXT(int, name, int, const char *, int, ...);         \
        OPEN_BODY(dir, path, next(dir, path, flags, mode))    \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
#define OPEN_2(name)                                         \
    int name(const char *path, int flags) {                  \
        NEXT(int, name, const char *, int);                  \
        OPEN_BODY(AT_FDCWD, path, next(path, flags))         \
    }
OPEN_2(__open_2)
OPEN_2(__open64_2)
#define CREAT(name)                                          \
    int name(const char *path, mode_t mode) {                \
        int flags = O_CREAT | O_WRONLY | O_TRUNC;            \
        NEXT(int, name, const char *, mode_t);               \
        OPEN_BODY(AT_FDCWD, path, next(path, mode))          \
    }
CREAT(creat)
CREAT(creat64)

int close(int fd) {
    NEXT(int, close, int);
    struct call c = {0};
    if (armed() && path_of_fd(fd, c.path) && below(c.path)) {
        int flags = fcntl(fd, F_GETFL);
        int writes = flags >= 0 && (flags & O_ACCMODE) != O_RDONLY;
        place(&c, writes ? "close-written" : "close-read", writes ? WRITES : 0, 0);
    }
    int result = next(fd); /* Linux releases the descriptor whatever close reports */
    if (c.error) {
        errno = c.error;
        result = -1;
    }
    note(&c, result, 0, 0, NULL, 0);
    return result;
}

DIR *opendir(const char *path) {
    NEXT(DIR *, opendir, const char *);
    ON(path_at(AT_FDCWD, path, c.path), "opendir", 0, 0);
    DIR *result;
    FAILS(NULL) result = next(path);
    note(&c, result ? 0 : -1, 0, 0, NULL, 0);
    return result;
}

/* ---- data ---- */
#define WRITE_BODY(opname, where, call_it)                                              \
    ON(path_of_fd(fd, c.path), opname, WRITES, (int64_t)count);                          \
    int64_t at = c.counted ? (where) : 0;                                                \
    if (c.cut) count /= 2;                                                               \
    ssize_t result;                                                                      \
    FAILS(-1) result = call_it;                                                          \
    if (c.counted) note(&c, result, inode_of_fd(fd), at, buffer, result > 0 ? result : 0); \
    return result;
static int64_t position(int fd) {
    int flags = fcntl(fd, F_GETFL);
    return lseek(fd, 0, flags >= 0 && (flags & O_APPEND) ? SEEK_END : SEEK_CUR);
}
ssize_t write(int fd, const void *buffer, size_t count) {
    NEXT(ssize_t, write, int, const void *, size_t);
    WRITE_BODY("write", position(fd), next(fd, buffer, count))
}
ssize_t pwrite(int fd, const void *buffer, size_t count, off_t offset) {
    NEXT(ssize_t, pwrite, int, const void *, size_t, off_t);
    WRITE_BODY("pwrite", offset, next(fd, buffer, count, offset))
}
ssize_t pwrite64(int fd, const void *buffer, size_t count, off64_t offset) {
    NEXT(ssize_t, pwrite64, int, const void *, size_t, off64_t);
    WRITE_BODY("pwrite", offset, next(fd, buffer, count, offset))
}
#define WRITEV_BODY(call_whole, call_first)                                                 \
    int64_t count = 0;                                                                      \
    for (int i = 0; i < n; i++) count += (int64_t)vectors[i].iov_len;                       \
    ON(path_of_fd(fd, c.path), "writev", WRITES, count);                                    \
    ssize_t result;                                                                         \
    int64_t at = c.counted ? where : 0;                                                     \
    FAILS(-1) result = call_whole;                                                          \
    if (c.counted) {                                                                        \
        int64_t left = result, here = at;                                                   \
        for (int i = 0; i < n && left > 0; i++) {                                           \
            int64_t part = left < (int64_t)vectors[i].iov_len ? left : (int64_t)vectors[i].iov_len; \
            note(&c, part, inode_of_fd(fd), here, vectors[i].iov_base, part);               \
            here += part;                                                                   \
            left -= part;                                                                   \
        }                                                                                   \
        if (result <= 0) note(&c, result, inode_of_fd(fd), at, NULL, 0);                    \
    }                                                                                       \
    return result;
ssize_t writev(int fd, const struct iovec *vectors, int n) {
    NEXT(ssize_t, writev, int, const struct iovec *, int);
    int64_t where = armed() ? position(fd) : 0;
    WRITEV_BODY(next(fd, vectors, n), 0)
}
ssize_t pwritev(int fd, const struct iovec *vectors, int n, off_t offset) {
    NEXT(ssize_t, pwritev, int, const struct iovec *, int, off_t);
    int64_t where = offset;
    WRITEV_BODY(next(fd, vectors, n, offset), 0)
}
ssize_t pwritev64(int fd, const struct iovec *vectors, int n, off64_t offset) {
    NEXT(ssize_t, pwritev64, int, const struct iovec *, int, off64_t);
    int64_t where = offset;
    WRITEV_BODY(next(fd, vectors, n, offset), 0)
}
/* What moves bytes without passing them through us is refused, as some file systems do: callers fall back. */
ssize_t sendfile64(int out, int in, off64_t *offset, size_t count) {
    NEXT(ssize_t, sendfile64, int, int, off64_t *, size_t);
    struct call c = {0};
    if (armed() && path_of_fd(out, c.path) && below(c.path)) {
        errno = EINVAL;
        return -1;
    }
    return next(out, in, offset, count);
}
ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t count, unsigned flags) {
    NEXT(ssize_t, copy_file_range, int, off64_t *, int, off64_t *, size_t, unsigned);
    struct call c = {0};
    if (armed() && path_of_fd(out, c.path) && below(c.path)) {
        errno = EXDEV;
        return -1;
    }
    return next(in, from, out, to, count, flags);
}
#define READ_BODY(call_it)                                  \
    ON(path_of_fd(fd, c.path), "read", 0, (int64_t)count);  \
    if (c.cut) count /= 2;                                  \
    ssize_t result;                                         \
    FAILS(-1) result = call_it;                             \
    note(&c, result, 0, 0, NULL, 0);                        \
    return result;
ssize_t read(int fd, void *buffer, size_t count) {
    NEXT(ssize_t, read, int, void *, size_t);
    READ_BODY(next(fd, buffer, count))
}
ssize_t pread64(int fd, void *buffer, size_t count, off64_t offset) {
    NEXT(ssize_t, pread64, int, void *, size_t, off64_t);
    READ_BODY(next(fd, buffer, count, offset))
}
ssize_t preadv64(int fd, const struct iovec *vectors, int n, off64_t offset) {
    NEXT(ssize_t, preadv64, int, const struct iovec *, int, off64_t);
    struct iovec first = n ? vectors[0] : (struct iovec){0};
    ON(path_of_fd(fd, c.path), "read", 0, (int64_t)first.iov_len);
    ssize_t result;
    if (c.cut) first.iov_len /= 2;
    FAILS(-1) result = c.cut ? next(fd, &first, 1, offset) : next(fd, vectors, n, offset);
    note(&c, result, 0, 0, NULL, 0);
    return result;
}
#define TRUNCATE(name, type)                                                      \
    int name(int fd, type size) {                                                 \
        NEXT(int, name, int, type);                                               \
        ON(path_of_fd(fd, c.path), "ftruncate", WRITES, 0);                       \
        int result;                                                               \
        FAILS(-1) result = next(fd, size);                                        \
        if (c.counted) note(&c, result, inode_of_fd(fd), size, NULL, 0);          \
        return result;                                                            \
    }
TRUNCATE(ftruncate, off_t)
TRUNCATE(ftruncate64, off64_t)

/* ---- durability ---- */
#define SYNC(name)                                                       \
    int name(int fd) {                                                   \
        NEXT(int, name, int);                                            \
        ON(path_of_fd(fd, c.path), #name, WRITES, 0);                    \
        int result;                                                      \
        FAILS(-1) result = next(fd);                                     \
        if (c.counted) note(&c, result, inode_of_fd(fd), 0, NULL, 0);    \
        return result;                                                   \
    }
SYNC(fsync)
SYNC(fdatasync)
int sync_file_range(int fd, off64_t offset, off64_t bytes, unsigned flags) {
    NEXT(int, sync_file_range, int, off64_t, off64_t, unsigned);
    ON(path_of_fd(fd, c.path), "sync_file_range", WRITES, 0);
    int result;
    FAILS(-1) result = next(fd, offset, bytes, flags);
    note(&c, result, 0, 0, NULL, 0);
    return result;
}
int flock(int fd, int operation) {
    NEXT(int, flock, int, int);
    ON(path_of_fd(fd, c.path), "flock", WRITES, 0);
    int result;
    FAILS(-1) result = next(fd, operation);
    note(&c, result, 0, operation, NULL, 0);
    return result;
}
#define ALLOCATE(name, type)                                             \
    int name(int fd, type offset, type bytes) {                          \
        NEXT(int, name, int, type, type);                                \
        ON(path_of_fd(fd, c.path), "fallocate", WRITES, 0);              \
        int result;                                                      \
        FAILS(-1) result = next(fd, offset, bytes);                      \
        if (c.error) result = c.error; /* reports by its value */        \
        note(&c, result ? -1 : 0, 0, offset, NULL, 0);                   \
        return result;                                                   \
    }
ALLOCATE(posix_fallocate, off_t)
ALLOCATE(posix_fallocate64, off64_t)

/* ---- names ---- */
#define TWO(from_dir, from, to_dir, to, opname, call_it)                                     \
    ON(path_at(from_dir, from, c.path) && path_at(to_dir, to, c.other), opname, WRITES, 0);  \
    uint64_t inode = c.counted ? inode_of_path(from_dir, from) : 0;                          \
    int result;                                                                              \
    FAILS(-1) result = call_it;                                                              \
    note(&c, result, inode, 0, NULL, 0);                                                     \
    return result;
int rename(const char *from, const char *to) {
    NEXT(int, rename, const char *, const char *);
    TWO(AT_FDCWD, from, AT_FDCWD, to, "rename", next(from, to))
}
int renameat(int a, const char *from, int b, const char *to) {
    NEXT(int, renameat, int, const char *, int, const char *);
    TWO(a, from, b, to, "rename", next(a, from, b, to))
}
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
    NEXT(int, renameat2, int, const char *, int, const char *, unsigned);
    TWO(a, from, b, to, "rename", next(a, from, b, to, flags))
}
int link(const char *from, const char *to) {
    NEXT(int, link, const char *, const char *);
    TWO(AT_FDCWD, from, AT_FDCWD, to, "link", next(from, to))
}
int linkat(int a, const char *from, int b, const char *to, int flags) {
    NEXT(int, linkat, int, const char *, int, const char *, int);
    TWO(a, from, b, to, "link", next(a, from, b, to, flags))
}
#define ONE(dir, path, opname, before, after, call_it)          \
    ON(path_at(dir, path, c.path), opname, WRITES, 0);          \
    uint64_t inode = c.counted && before ? inode_of_path(dir, path) : 0; \
    int result;                                                 \
    FAILS(-1) result = call_it;                                 \
    if (c.counted && after && result >= 0) inode = inode_of_path(dir, path); \
    note(&c, result, inode, 0, NULL, 0);                        \
    return result;
int symlink(const char *target, const char *path) {
    NEXT(int, symlink, const char *, const char *);
    ONE(AT_FDCWD, path, "symlink", 0, 1, next(target, path))
}
int unlink(const char *path) {
    NEXT(int, unlink, const char *);
    ONE(AT_FDCWD, path, "unlink", 1, 0, next(path))
}
int unlinkat(int dir, const char *path, int flags) {
    NEXT(int, unlinkat, int, const char *, int);
    ONE(dir, path, flags & AT_REMOVEDIR ? "rmdir" : "unlink", 1, 0, next(dir, path, flags))
}
int remove(const char *path) {
    NEXT(int, remove, const char *);
    ONE(AT_FDCWD, path, "unlink", 1, 0, next(path))
}
int rmdir(const char *path) {
    NEXT(int, rmdir, const char *);
    ONE(AT_FDCWD, path, "rmdir", 1, 0, next(path))
}
int mkdir(const char *path, mode_t mode) {
    NEXT(int, mkdir, const char *, mode_t);
    ONE(AT_FDCWD, path, "mkdir", 0, 1, next(path, mode))
}
int mkdirat(int dir, const char *path, mode_t mode) {
    NEXT(int, mkdirat, int, const char *, mode_t);
    ONE(dir, path, "mkdir", 0, 1, next(dir, path, mode))
}
int utimensat(int dir, const char *path, const struct timespec times[2], int flags) {
    NEXT(int, utimensat, int, const char *, const struct timespec *, int);
    ONE(dir, path, "utimensat", 0, 0, next(dir, path, times, flags))
}
int chmod(const char *path, mode_t mode) {
    NEXT(int, chmod, const char *, mode_t);
    ONE(AT_FDCWD, path, "chmod", 0, 0, next(path, mode))
}
