// Loaded into every process of a storm (LD_PRELOAD): a clock that can be set, and a folder that can be full or read-only.
// What holds is read from a file of four numbers that all processes map, so a change is seen everywhere at once.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct control {
    int64_t clock_offset_seconds;
    int64_t is_full;
    int64_t is_read_only;
    int64_t num_refused;  // writes
};

static struct control calm;
static volatile struct control *control = &calm;
static const char *folder;

__attribute__((constructor)) static void attach(void) {
    const char *path = getenv("COSMOS_STORM_CONTROL");
    folder = getenv("COSMOS_STORM_FOLDER");
    int file = path && folder ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0) : -1;
    if (file < 0) return;
    void *found = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) control = found;
    close(file);
}

static int is_below(int base, const char *path) {
    char whole[2 * PATH_MAX] = "";
    if (path[0] != '/') {
        char link[64] = "/proc/self/cwd";
        if (base != AT_FDCWD) snprintf(link, sizeof link, "/proc/self/fd/%d", base);
        ssize_t length = readlink(link, whole, PATH_MAX - 1);
        if (length < 0) return 0;
        whole[length] = '/';
        whole[length + 1] = 0;
    }
    strncat(whole, path, PATH_MAX - 1);
    return strncmp(whole, folder, strlen(folder)) == 0;
}

static int is_file_below(int file) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return strncmp(path, folder, strlen(folder)) == 0;
}

static int refuses_write(int file) {
    int error = control->is_read_only ? EROFS : control->is_full ? ENOSPC : 0;
    if (!error || !is_file_below(file)) return 0;
    __sync_fetch_and_add(&control->num_refused, 1);
    errno = error;
    return 1;
}

static int refuses_change(int base, const char *path, int needs_room) {
    int error = control->is_read_only ? EROFS : control->is_full && needs_room ? ENOSPC : 0;
    if (!error || !path || !is_below(base, path)) return 0;
    errno = error;
    return 1;
}

static int refuses_open(int base, const char *path, int flags) {
    int changes = (flags & O_ACCMODE) != O_RDONLY || flags & (O_CREAT | O_TRUNC);
    return changes && refuses_change(base, path, 0);
}

#define REAL(name) ((__typeof__(name) *)dlsym(RTLD_NEXT, #name))
#define MODE(last) mode_t mode = 0; va_list more; va_start(more, last); mode = va_arg(more, mode_t); va_end(more)

int open(const char *path, int flags, ...) {
    MODE(flags);
    return refuses_open(AT_FDCWD, path, flags) ? -1 : REAL(open)(path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    MODE(flags);
    return refuses_open(AT_FDCWD, path, flags) ? -1 : REAL(open64)(path, flags, mode);
}
int openat(int base, const char *path, int flags, ...) {
    MODE(flags);
    return refuses_open(base, path, flags) ? -1 : REAL(openat)(base, path, flags, mode);
}
int openat64(int base, const char *path, int flags, ...) {
    MODE(flags);
    return refuses_open(base, path, flags) ? -1 : REAL(openat64)(base, path, flags, mode);
}

#define CHANGE(name, parameters, arguments, base, path, needs_room) \
    int name parameters { return refuses_change(base, path, needs_room) ? -1 : REAL(name) arguments; }

CHANGE(mkdir, (const char *path, mode_t mode), (path, mode), AT_FDCWD, path, 1)
CHANGE(mkdirat, (int base, const char *path, mode_t mode), (base, path, mode), base, path, 1)
CHANGE(unlink, (const char *path), (path), AT_FDCWD, path, 0)
CHANGE(unlinkat, (int base, const char *path, int flags), (base, path, flags), base, path, 0)
CHANGE(rmdir, (const char *path), (path), AT_FDCWD, path, 0)
CHANGE(rename, (const char *old, const char *new), (old, new), AT_FDCWD, new, 0)
CHANGE(renameat, (int a, const char *old, int b, const char *new), (a, old, b, new), b, new, 0)
CHANGE(link, (const char *old, const char *new), (old, new), AT_FDCWD, new, 1)
CHANGE(symlink, (const char *old, const char *new), (old, new), AT_FDCWD, new, 1)
CHANGE(chmod, (const char *path, mode_t mode), (path, mode), AT_FDCWD, path, 0)

#define WRITE(type, name, parameters, arguments, file) \
    type name parameters { return refuses_write(file) ? -1 : REAL(name) arguments; }

WRITE(ssize_t, write, (int file, const void *data, size_t size), (file, data, size), file)
WRITE(ssize_t, writev, (int file, const struct iovec *data, int count), (file, data, count), file)
WRITE(ssize_t, pwrite, (int file, const void *data, size_t size, off_t at), (file, data, size, at), file)
WRITE(ssize_t, pwrite64, (int file, const void *data, size_t size, off64_t at), (file, data, size, at), file)
WRITE(int, ftruncate, (int file, off_t size), (file, size), file)
WRITE(int, ftruncate64, (int file, off64_t size), (file, size), file)
WRITE(int, fallocate64, (int file, int mode, off64_t at, off64_t size), (file, mode, at, size), file)
WRITE(ssize_t, copy_file_range, (int from, off64_t *at, int to, off64_t *start, size_t size, unsigned int flags),
      (from, at, to, start, size, flags), to)
WRITE(ssize_t, sendfile, (int to, int from, off_t *at, size_t size), (to, from, at, size), to)
WRITE(ssize_t, sendfile64, (int to, int from, off64_t *at, size_t size), (to, from, at, size), to)

int clock_gettime(clockid_t clock, struct timespec *now) {
    int code = REAL(clock_gettime)(clock, now);
    if (code == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += control->clock_offset_seconds;
    return code;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int code = REAL(gettimeofday)(now, zone);
    if (code == 0) now->tv_sec += control->clock_offset_seconds;
    return code;
}
time_t time(time_t *now) {
    time_t found = REAL(time)(NULL) + control->clock_offset_seconds;
    if (now) *now = found;
    return found;
}
