/* Device memory that all processes see: a file for each allocation, alive while its flock is held.
 *
 * A new file is locked (shared) through the descriptor that made it. Copies of this descriptor,
 * also in other processes and in flight inside a socket, and mappings made from it, all keep the
 * one open file description and with it the lock; the kernel drops it when the last of them is
 * gone, however its process ended. So a file that can be locked exclusively through another
 * description is nobody's, and whoever notices that removes it. The file "lock" excludes everybody
 * else between the creation of a file and its lock, and while free memory is counted and taken.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "machine.h"

#define MAGIC "trimscud"

static int lock_descriptor(int descriptor, int how) {
    int result;
    do
        result = flock(descriptor, how);
    while (result < 0 && errno == EINTR);
    return result;
}

static int enter(const struct machine *machine) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/lock", machine->directory);
    int lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (lock >= 0 && lock_descriptor(lock, LOCK_EX) < 0) {
        close(lock);
        lock = -1;
    }
    return lock;
}

static void leave(int lock) {
    /* A child that another thread forked meanwhile may hold the descriptor: unlock by name. */
    lock_descriptor(lock, LOCK_UN);
    close(lock);
}

static int open_directory(const struct machine *machine) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/allocations", machine->directory);
    return open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

bool registry_identify(int descriptor, struct trailer *trailer) {
    struct stat status;
    if (fstat(descriptor, &status) < 0 || !S_ISREG(status.st_mode) ||
        status.st_size < TRAILER_BYTES)
        return false;
    off_t bytes = status.st_size - TRAILER_BYTES;
    return pread(descriptor, trailer, sizeof *trailer, bytes) == sizeof *trailer &&
           memcmp(trailer->magic, MAGIC, sizeof trailer->magic) == 0 &&
           trailer->bytes == (uint64_t)bytes;
}

/* The size of an allocation of this device (NULL: any); one that nobody holds is removed. */
static uint64_t count(int directory, const char *name, const char *device) {
    struct trailer trailer;
    uint64_t bytes = 0;
    int descriptor = openat(directory, name, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0)
        return 0;
    if (lock_descriptor(descriptor, LOCK_EX | LOCK_NB) == 0) {
        unlinkat(directory, name, 0);
        lock_descriptor(descriptor, LOCK_UN);
    } else if (registry_identify(descriptor, &trailer) &&
               (device == NULL || strcmp(trailer.device, device) == 0)) {
        bytes = trailer.bytes;
    }
    close(descriptor);
    return bytes;
}

/* Of what begins with a kind; "" is all. */
static uint64_t count_all(int directory, const char *device, const char *kind) {
    uint64_t bytes = 0;
    int own = openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *entries = own < 0 ? NULL : fdopendir(own);
    if (entries == NULL)
        return 0;
    for (struct dirent *entry; (entry = readdir(entries)) != NULL;)
        if (entry->d_name[0] != '.' && strncmp(entry->d_name, kind, strlen(kind)) == 0)
            bytes += count(directory, entry->d_name, device);
    closedir(entries);
    return bytes;
}

uint64_t registry_used(const struct machine *machine, const char *device, const char *kind) {
    uint64_t bytes = 0;
    int lock = enter(machine);
    if (lock < 0)
        return 0;
    int directory = open_directory(machine);
    if (directory >= 0) {
        bytes = count_all(directory, device, kind);
        close(directory);
    }
    leave(lock);
    return bytes;
}

uint64_t registry_process_start(pid_t pid) {
    char path[64], line[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0)
        return 0;
    ssize_t length = read(descriptor, line, sizeof line - 1);
    close(descriptor);
    if (length <= 0)
        return 0;
    line[length] = '\0';
    /* Field 22 of proc(5); field 2, the command, may hold spaces and parentheses. */
    char *field = strrchr(line, ')'), state = 'Z';
    unsigned long long start = 0;
    if (field == NULL || sscanf(field,
                                ") %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d "
                                "%*d %*d %*d %*d %llu",
                                &state, &start) != 2)
        return 0;
    return state == 'Z' || state == 'X' ? 0 : start;
}

static int make_file(int directory, const char *kind, char name[NAME_BYTES]) {
    static _Atomic unsigned serial; /* unique in this process; O_EXCL between processes */
    for (;;) {
        snprintf(name, NAME_BYTES, "%s.%d.%u", kind, (int)getpid(), ++serial);
        int descriptor = openat(directory, name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (descriptor >= 0 || errno != EEXIST)
            return descriptor;
    }
}

static int fill_file(int descriptor, const struct device *device, uint64_t bytes) {
    struct trailer trailer = {.bytes = bytes, .creator = getpid()};
    memcpy(trailer.magic, MAGIC, sizeof trailer.magic);
    memcpy(trailer.device, device->id, sizeof trailer.device);
    trailer.creator_start = registry_process_start(getpid());
    /* Pages appear when they are first touched; the account counts all of them, as a GPU does. */
    if (ftruncate(descriptor, (off_t)(bytes + TRAILER_BYTES)) < 0 ||
        pwrite(descriptor, &trailer, sizeof trailer, (off_t)bytes) != sizeof trailer)
        return -1;
    return lock_descriptor(descriptor, LOCK_SH | LOCK_NB);
}

static int create(int directory, const struct device *device, const char *kind, uint64_t bytes,
                  char name[NAME_BYTES]) {
    uint64_t used = count_all(directory, device->id, "");
    if (bytes > device->total_bytes || used > device->total_bytes - bytes)
        return -ENOMEM;
    int descriptor = make_file(directory, kind, name);
    if (descriptor < 0)
        return -errno;
    if (fill_file(descriptor, device, bytes) < 0) {
        int error = errno;
        unlinkat(directory, name, 0);
        close(descriptor);
        return -error;
    }
    return descriptor;
}

int registry_create(const struct machine *machine, const struct device *device, const char *kind,
                    uint64_t bytes, char name[NAME_BYTES]) {
    int lock = enter(machine);
    if (lock < 0)
        return -errno;
    int directory = open_directory(machine);
    int descriptor = directory < 0 ? -errno : create(directory, device, kind, bytes, name);
    if (directory >= 0)
        close(directory);
    leave(lock);
    return descriptor;
}

int registry_open(const struct machine *machine, const char *name) {
    int lock = enter(machine);
    if (lock < 0)
        return -errno;
    int directory = open_directory(machine);
    int descriptor = directory < 0 ? -1 : openat(directory, name, O_RDWR | O_CLOEXEC);
    /* From here on it is alive through this description too. */
    int result = descriptor < 0 || lock_descriptor(descriptor, LOCK_SH | LOCK_NB) < 0 ? -errno : 0;
    if (result < 0 && descriptor >= 0)
        close(descriptor);
    if (directory >= 0)
        close(directory);
    leave(lock);
    return result < 0 ? result : descriptor;
}
