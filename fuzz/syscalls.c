/* Counts a process's calls that change files, and makes one of them fail, kill the process or be recorded.
 *
 * The fuzzer loads this library with LD_PRELOAD (Linux, glibc). A page of memory that it shares with the processes which
 * it forks (`struct control`) says what to do; only the process whose id is in the page is affected. The functions are those
 * that Python, SQLite and Rust's standard library call to change files.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum action { NOTHING = 0, KILL = 1, DISK_FULL = 2, CLOCK_JUMP = 3, RECORD = 4 };

struct control {
    int64_t pid;      /* the process to affect; 0: none */
    int64_t action;
    int64_t at;       /* the number of the call, from 1 */
    int64_t count;    /* calls so far */
    int64_t jump_s;   /* for CLOCK_JUMP */
    int64_t log_fd;   /* for RECORD */
    int64_t hit;      /* whether the call was reached */
    char folder[1024]; /* only files below it count; empty: all */
};

static struct control *control;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void open_control(void) {
    const char *path = getenv("FUZZ_CONTROL");
    int fd = path ? open(path, O_RDWR) : -1;
    if (fd < 0) return;
    void *page = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (page != MAP_FAILED) control = page;
}

static int is_watched(void) { return control && control->pid && control->pid == (int64_t)getpid(); }

static int is_below(const char *path) {
    size_t length = strlen(control->folder);
    return length == 0 || strncmp(path, control->folder, length) == 0;
}

static int path_of(int fd, char *path, size_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, size - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return path[0] == '/';
}

static void absolute(int folder_fd, const char *path, char *out, size_t size) {
    char folder[4096] = "";
    if (path[0] == '/') {
        snprintf(out, size, "%s", path);
        return;
    }
    if (folder_fd == AT_FDCWD) {
        if (!getcwd(folder, sizeof folder)) folder[0] = 0;
    } else {
        path_of(folder_fd, folder, sizeof folder);
    }
    snprintf(out, size, "%s/%s", folder, path);
}

/* One record: kind, offset, lengths of two texts and of the data, then these. */
static void record(char kind, int64_t offset, const char *path, const char *other, const void *data, int64_t length) {
    struct { int64_t kind, offset, path, other, data; } head = {
        kind, offset, (int64_t)strlen(path), (int64_t)strlen(other), length};
    struct iovec parts[4] = {
        {&head, sizeof head}, {(void *)path, head.path}, {(void *)other, head.other}, {(void *)data, length}};
    ssize_t done = REAL(writev)((int)control->log_fd, parts, 4);
    if (done != (ssize_t)(sizeof head + head.path + head.other + length)) abort();
}

/* Whether this call has to fail for a full disk; does not return if it kills. `is_write`: it needs space. */
static int counted(const char *path, int is_write) {
    if (!is_watched() || !is_below(path)) return 0;
    int64_t number = __atomic_add_fetch(&control->count, 1, __ATOMIC_SEQ_CST);
    if (number < control->at) return 0;
    if (control->action == KILL) {
        control->hit = 1;
        kill(getpid(), SIGKILL);
        for (;;) pause();
    }
    if (control->action == CLOCK_JUMP) control->hit = 1;
    if (control->action == DISK_FULL && is_write) {
        control->hit = 1;
        return 1;
    }
    return 0;
}

static int is_recorded(const char *path) {
    return is_watched() && control->action == RECORD && is_below(path);
}

#define FULL(path) do { if (counted(path, 1)) { errno = ENOSPC; return -1; } } while (0)

ssize_t write(int fd, const void *data, size_t length) {
    char path[4096];
    if (is_watched() && path_of(fd, path, sizeof path)) {
        FULL(path);
        ssize_t done = REAL(write)(fd, data, length);
        if (done > 0 && is_recorded(path)) record('w', lseek(fd, 0, SEEK_CUR) - done, path, "", data, done);
        return done;
    }
    return REAL(write)(fd, data, length);
}

ssize_t pwrite64(int fd, const void *data, size_t length, off64_t offset) {
    char path[4096];
    if (is_watched() && path_of(fd, path, sizeof path)) {
        FULL(path);
        ssize_t done = REAL(pwrite64)(fd, data, length, offset);
        if (done > 0 && is_recorded(path)) record('w', offset, path, "", data, done);
        return done;
    }
    return REAL(pwrite64)(fd, data, length, offset);
}

ssize_t pwrite(int fd, const void *data, size_t length, off_t offset) { return pwrite64(fd, data, length, offset); }

ssize_t writev(int fd, const struct iovec *parts, int count) {
    char path[4096];
    if (is_watched() && path_of(fd, path, sizeof path) && is_below(path)) {
        ssize_t total = 0; /* part by part, so that each is counted and recorded as a write */
        for (int i = 0; i < count; i++) {
            ssize_t done = write(fd, parts[i].iov_base, parts[i].iov_len);
            if (done < 0) return total ? total : -1;
            total += done;
            if ((size_t)done < parts[i].iov_len) break;
        }
        return total;
    }
    return REAL(writev)(fd, parts, count);
}

int ftruncate64(int fd, off64_t length) {
    char path[4096];
    if (is_watched() && path_of(fd, path, sizeof path)) {
        counted(path, 0);
        int done = REAL(ftruncate64)(fd, length);
        if (done == 0 && is_recorded(path)) record('t', length, path, "", "", 0);
        return done;
    }
    return REAL(ftruncate64)(fd, length);
}

int ftruncate(int fd, off_t length) { return ftruncate64(fd, length); }

/* Record what a file holds when it is flushed: not every write is one of the calls here (safetensors maps memory). */
static void record_content(const char *path) {
    int fd = REAL(open)(path, O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (fd < 0 || fstat(fd, &status) != 0) abort();
    if (S_ISREG(status.st_mode) && status.st_size > 0) {
        void *data = mmap(NULL, status.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (data == MAP_FAILED) abort();
        record('f', 0, path, "", data, status.st_size);
        munmap(data, status.st_size);
    }
    close(fd);
}

static int synced(int fd, int (*sync)(int)) {
    char path[4096];
    if (is_watched() && path_of(fd, path, sizeof path)) {
        counted(path, 0);
        int done = sync(fd);
        if (done == 0 && is_recorded(path)) {
            record_content(path);
            record('s', 0, path, "", "", 0);
        }
        return done;
    }
    return sync(fd);
}

int fsync(int fd) { return synced(fd, REAL(fsync)); }
int fdatasync(int fd) { return synced(fd, REAL(fdatasync)); }

static int renamed(int from_fd, const char *from, int to_fd, const char *to) {
    char source[8192], target[8192];
    if (!is_watched()) return REAL(renameat)(from_fd, from, to_fd, to);
    absolute(from_fd, from, source, sizeof source);
    absolute(to_fd, to, target, sizeof target);
    counted(target, 0);
    int done = REAL(renameat)(from_fd, from, to_fd, to);
    if (done == 0 && is_recorded(target)) record('r', 0, source, target, "", 0);
    return done;
}

int rename(const char *from, const char *to) { return renamed(AT_FDCWD, from, AT_FDCWD, to); }
int renameat(int from_fd, const char *from, int to_fd, const char *to) { return renamed(from_fd, from, to_fd, to); }

static int removed(int folder_fd, const char *path, int flags) {
    char full[8192];
    if (!is_watched()) return REAL(unlinkat)(folder_fd, path, flags);
    absolute(folder_fd, path, full, sizeof full);
    counted(full, 0);
    int done = REAL(unlinkat)(folder_fd, path, flags);
    if (done == 0 && is_recorded(full)) record('u', 0, full, "", "", 0);
    return done;
}

int unlink(const char *path) { return removed(AT_FDCWD, path, 0); }
int unlinkat(int folder_fd, const char *path, int flags) { return removed(folder_fd, path, flags); }
int rmdir(const char *path) { return removed(AT_FDCWD, path, AT_REMOVEDIR); }

static int made(int folder_fd, const char *path, mode_t mode) {
    char full[8192];
    if (!is_watched()) return REAL(mkdirat)(folder_fd, path, mode);
    absolute(folder_fd, path, full, sizeof full);
    FULL(full);
    int done = REAL(mkdirat)(folder_fd, path, mode);
    if (done == 0 && is_recorded(full)) record('m', 0, full, "", "", 0);
    return done;
}

int mkdir(const char *path, mode_t mode) { return made(AT_FDCWD, path, mode); }
int mkdirat(int folder_fd, const char *path, mode_t mode) { return made(folder_fd, path, mode); }

static int opened(int folder_fd, const char *path, int flags, mode_t mode) {
    static int (*real)(int, const char *, int, ...);
    if (!real) real = (int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, "openat64");
    if (!(flags & (O_CREAT | O_TRUNC)) || !is_watched()) return real(folder_fd, path, flags, mode);
    char full[8192];
    absolute(folder_fd, path, full, sizeof full);
    FULL(full);
    int fd = real(folder_fd, path, flags, mode);
    if (fd >= 0 && is_recorded(full)) record(flags & O_TRUNC ? 'o' : 'c', 0, full, "", "", 0);
    return fd;
}

#define OPEN(name)                                                     \
    int name(const char *path, int flags, ...) {                       \
        va_list rest;                                                  \
        va_start(rest, flags);                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                                  \
        return opened(AT_FDCWD, path, flags, mode);                    \
    }
#define OPENAT(name)                                                   \
    int name(int folder_fd, const char *path, int flags, ...) {        \
        va_list rest;                                                  \
        va_start(rest, flags);                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                                  \
        return opened(folder_fd, path, flags, mode);                   \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

/* Notes the name of shared memory that a process makes, whichever process it is: the fuzzer looks whether it is left. */
int shm_open(const char *name, int flags, mode_t mode) {
    int fd = REAL(shm_open)(name, flags, mode);
    const char *path = flags & O_CREAT ? getenv("FUZZ_SHARED_MEMORY") : NULL;
    if (fd < 0 || !path) return fd;
    int log = REAL(open)(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    char line[512];
    int length = snprintf(line, sizeof line, "%s\n", name + (name[0] == '/'));
    if (log < 0 || REAL(write)(log, line, length) != length) abort();
    close(log);
    return fd;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = REAL(clock_gettime);
    int done = real(clock, time);
    if (clock == CLOCK_REALTIME && is_watched() && control->action == CLOCK_JUMP && control->hit)
        time->tv_sec += control->jump_s;
    return done;
}
