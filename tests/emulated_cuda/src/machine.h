/* The emulated machine, as the environment describes it, and the memory all processes see. */
#ifndef MACHINE_H
#define MACHINE_H

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define MAX_DEVICES 16
#define GRANULARITY ((uint64_t)2 << 20)

struct device {
    char id[48];            /* "GPU-..." or "MIG-..." */
    unsigned char uuid[16]; /* the same as octets */
    unsigned char gpu_uuid[16];
    char name[96];
    uint64_t total_bytes;
    int gpu;
    int instance; /* of the GPU under MIG, from 1; 0: the whole GPU */
};

struct machine {
    char directory[PATH_MAX - 64];
    struct device devices[MAX_DEVICES];
    int device_count;
    int gpu_count;
    int nvml_order[MAX_DEVICES]; /* the GPU at each NVML index */
    bool is_mig;
    bool has_nvml;
    bool has_peer_access;
    bool loses_peer_copies; /* they end well, and other bytes arrive */
    bool can_share;
    bool is_exclusive; /* a GPU has one process with a context at a time, unless MPS shares it */
    bool has_mps;
    uint64_t context_bytes;
    long copy_delay_ms;
};

/* Describe a whole GPU, under MIG too, where it is no device of its own. */
void machine_gpu(int gpu, struct device *device);
/* False when the environment describes no machine (or one that makes no sense). */
bool machine_read(struct machine *machine);
/* What CUDA_VISIBLE_DEVICES leaves: indices into machine->devices in the order of their numbers. */
int machine_visible(const struct machine *machine, int *indices);

/* --- registry.c ------------------------------------------------------------------------------- */

/* The last page of every allocation's file says what it is. */
struct trailer {
    char magic[8];
    char device[48];
    uint64_t bytes;
    int64_t creator;
    uint64_t creator_start; /* clock ticks: process ids are used again */
};

#define TRAILER_BYTES 4096
#define NAME_BYTES 40

/* A descriptor of new memory, or -ENOMEM when the device is full, or another negative errno. */
int registry_create(const struct machine *machine, const struct device *device, const char *kind,
                    uint64_t bytes, char name[NAME_BYTES]);
/* A descriptor of existing memory by its name, or a negative errno. */
int registry_open(const struct machine *machine, const char *name);
/* Whether a descriptor is device memory, and which. */
bool registry_identify(int descriptor, struct trailer *trailer);
/* Bytes that something alive holds: memory of a kind, or "" for all. */
uint64_t registry_used(const struct machine *machine, const char *device, const char *kind);
/* When a process started; 0 when there is none. */
uint64_t registry_process_start(pid_t pid);

#endif
