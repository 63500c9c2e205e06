/* Preloaded into a process, fails, delays or holds the system calls that write below one folder, and shifts the wall
   clock, as a file in shared memory says: see disk.py. Linux only. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct control {
    int64_t fault;           /* 0: none; an errno; -1: the process is held before each call, and amid each write */
    int64_t first, last;     /* the calls that it hits, counted from 0 */
    int64_t write_us, fsync_us; /* how long a call takes */
    int64_t count, hits;     /* calls so far, and those that were hit */
    int64_t clock_us;        /* added to the wall clock */
    int64_t held, released;  /* how often the process was held, and how often it was told to go on */
    char what[256];          /* the first call that was hit, or the one that is held, and its path */
};

static struct control *control;
static const char *folder;
static size_t folder_length;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("FAULTS_CONTROL");
    folder = getenv("FAULTS_FOLDER");
    if (!path || !folder) return;
    folder_length = strlen(folder);
    int (*real_open)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    int descriptor = real_open(path, O_RDWR | O_CLOEXEC);
    if (descriptor < 0) return;
    void *shared = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (shared != MAP_FAILED) control = shared;
    close(descriptor);
}

static int below(const char *path) {
    return path && !strncmp(path, folder, folder_length) && (path[folder_length] == '/' || !path[folder_length]);
}

static const char *path_of(int descriptor, char *buffer, size_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, buffer, size - 1);
    if (length < 0) return NULL;
    buffer[length] = 0;
    return buffer;
}

#define SECTOR 512 /* bytes that a disk writes in place as a whole */
enum { ITSELF, FAILS, HALF, IN_TWO };

/* A thread that was held has it until its call has returned, so nothing changes while another one is held. */
static pthread_mutex_t holding = PTHREAD_MUTEX_INITIALIZER;
static __thread int holds;

static void hold(const char *call, const char *path) {
    if (!holds) pthread_mutex_lock(&holding);
    holds = 1;
    snprintf(control->what, sizeof control->what, "%s %s", call, path + folder_length);
    int64_t number = __atomic_add_fetch(&control->held, 1, __ATOMIC_SEQ_CST);
    while (control->fault == -1 && __atomic_load_n(&control->released, __ATOMIC_SEQ_CST) < number) usleep(100);
}

static long done(long result) {
    if (holds) {
        holds = 0;
        pthread_mutex_unlock(&holding);
    }
    return result;
}

/* What becomes of a call on this path. FAILS: errno is set. HALF: as the first write does for which a full disk has no
   room. IN_TWO: itself, in two parts, between which the process is held. */
static int fate(const char *call, const char *path) {
    if (!control || !below(path)) return ITSELF;
    int is_fsync = !strcmp(call, "fsync") || !strcmp(call, "fdatasync"), is_write = !strcmp(call, "write");
    int64_t wait = is_fsync ? control->fsync_us : control->write_us, fault = control->fault;
    if (wait) usleep((useconds_t)wait);
    if (fault == ENOSPC && (!strcmp(call, "unlink") || !strcmp(call, "rmdir") || !strcmp(call, "ftruncate")))
        return ITSELF;
    int64_t number = __atomic_fetch_add(&control->count, 1, __ATOMIC_SEQ_CST);
    if (!fault || number < control->first || number > control->last) return ITSELF;
    if (fault == -1) {
        hold(call, path);
        return is_write ? IN_TWO : ITSELF;
    }
    int first = !__atomic_fetch_add(&control->hits, 1, __ATOMIC_SEQ_CST);
    if (first) snprintf(control->what, sizeof control->what, "%s %s", call, path + folder_length);
    if (fault == ENOSPC && first && is_write) return HALF;
    errno = (int)fault;
    return FAILS;
}

static int fate_of(const char *call, int descriptor) {
    char buffer[4096];
    int before = errno;
    int found = control ? fate(call, path_of(descriptor, buffer, sizeof buffer)) : ITSELF;
    if (found != FAILS) errno = before;
    return found;
}

/* Of a path that may be relative to a folder. */
static int fate_at(const char *call, int at, const char *path) {
    char start[4096], whole[8192];
    if (!control || !path) return 0;
    if (path[0] == '/') return fate(call, path);
    if (at == AT_FDCWD) {
        if (!getcwd(start, sizeof start)) return 0;
    } else if (!path_of(at, start, sizeof start))
        return 0;
    snprintf(whole, sizeof whole, "%s/%s", start, path);
    return fate(call, whole);
}

#define REAL(result, name, ...)                         \
    static result (*real)(__VA_ARGS__);                 \
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, name)

/* A file that is opened for writing. On a full disk, only a new one fails. */
static int open_fails(int at, const char *path, int flags) {
    struct stat found;
    if (!control || !((flags & O_CREAT) || (flags & O_ACCMODE) != O_RDONLY)) return 0;
    if (control->fault == ENOSPC && !fstatat(at, path, &found, 0)) return 0;
    return fate_at("open", at, path) == FAILS;
}

#define OPEN(name)                                      \
    int name(const char *path, int flags, ...) {        \
        va_list rest;                                   \
        va_start(rest, flags);                          \
        mode_t mode = va_arg(rest, mode_t);             \
        va_end(rest);                                   \
        REAL(int, #name, const char *, int, mode_t);    \
        return (int)done(open_fails(AT_FDCWD, path, flags) ? -1 : real(path, flags, mode)); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                    \
    int name(int at, const char *path, int flags, ...) { \
        va_list rest;                                   \
        va_start(rest, flags);                          \
        mode_t mode = va_arg(rest, mode_t);             \
        va_end(rest);                                   \
        REAL(int, #name, int, const char *, int, mode_t); \
        return (int)done(open_fails(at, path, flags) ? -1 : real(at, path, flags, mode)); \
    }
OPENAT(openat)
OPENAT(openat64)

/* `least`: a write of fewer bytes is never cut. `advance`: moves on to the second part. */
#define WRITE(length, least, advance, call)             \
    {                                                   \
        int found = fate_of("write", descriptor);       \
        if (found == FAILS) return -1;                  \
        if (found == ITSELF || length < least) return done(call); \
        size_t rest = length - length / 2;              \
        length /= 2;                                    \
        ssize_t half = call;                            \
        if (found == HALF || half < (ssize_t)length) return done(half); \
        char buffer[4096];                              \
        hold("half of write", path_of(descriptor, buffer, sizeof buffer)); \
        advance;                                        \
        length = rest;                                  \
        ssize_t other = call;                           \
        return done(other < 0 ? half : half + other);   \
    }
ssize_t write(int descriptor, const void *data, size_t length) {
    REAL(ssize_t, "write", int, const void *, size_t);
    WRITE(length, 2, data = (const char *)data + half, real(descriptor, data, length))
}
ssize_t pwrite(int descriptor, const void *data, size_t length, off_t at) {
    REAL(ssize_t, "pwrite", int, const void *, size_t, off_t);
    WRITE(length, SECTOR, (data = (const char *)data + half, at += half), real(descriptor, data, length, at))
}
ssize_t pwrite64(int descriptor, const void *data, size_t length, off64_t at) {
    REAL(ssize_t, "pwrite64", int, const void *, size_t, off64_t);
    WRITE(length, SECTOR, (data = (const char *)data + half, at += half), real(descriptor, data, length, at))
}
ssize_t writev(int descriptor, const struct iovec *parts, int count) {
    REAL(ssize_t, "writev", int, const struct iovec *, int);
    return done(fate_of("write", descriptor) == FAILS ? -1 : real(descriptor, parts, count));
}

#define ON_DESCRIPTOR(name, call, parameters, arguments, ...) \
    int name parameters {                               \
        REAL(int, #name, __VA_ARGS__);                  \
        return (int)done(fate_of(call, descriptor) == FAILS ? -1 : real arguments); \
    }
ON_DESCRIPTOR(fsync, "fsync", (int descriptor), (descriptor), int)
ON_DESCRIPTOR(fdatasync, "fdatasync", (int descriptor), (descriptor), int)
ON_DESCRIPTOR(ftruncate, "ftruncate", (int descriptor, off_t size), (descriptor, size), int, off_t)
ON_DESCRIPTOR(ftruncate64, "ftruncate", (int descriptor, off64_t size), (descriptor, size), int, off64_t)
ON_DESCRIPTOR(fchmod, "chmod", (int descriptor, mode_t mode), (descriptor, mode), int, mode_t)

#define ON_PATH(name, call, at, parameters, arguments, ...) \
    int name parameters {                               \
        REAL(int, #name, __VA_ARGS__);                  \
        return (int)done(fate_at(call, at, path) == FAILS ? -1 : real arguments); \
    }
ON_PATH(rename, "rename", AT_FDCWD, (const char *path, const char *to), (path, to), const char *, const char *)
ON_PATH(mkdir, "mkdir", AT_FDCWD, (const char *path, mode_t mode), (path, mode), const char *, mode_t)
ON_PATH(unlink, "unlink", AT_FDCWD, (const char *path), (path), const char *)
ON_PATH(rmdir, "rmdir", AT_FDCWD, (const char *path), (path), const char *)
ON_PATH(chmod, "chmod", AT_FDCWD, (const char *path, mode_t mode), (path, mode), const char *, mode_t)
ON_PATH(unlinkat, "unlink", at, (int at, const char *path, int flags), (at, path, flags), int, const char *, int)
ON_PATH(utimensat, "utime", at, (int at, const char *path, const struct timespec times[2], int flags),
        (at, path, times, flags), int, const char *, const struct timespec *, int)

/* ---- the wall clock ---- */

int clock_gettime(clockid_t clock, struct timespec *time) {
    REAL(int, "clock_gettime", clockid_t, struct timespec *);
    int result = real(clock, time);
    if (!result && control && clock == CLOCK_REALTIME) time->tv_sec += control->clock_us / 1000000;
    return result;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    REAL(int, "gettimeofday", struct timeval *, void *);
    int result = real(now, zone);
    if (!result && control) now->tv_sec += control->clock_us / 1000000;
    return result;
}
time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}
