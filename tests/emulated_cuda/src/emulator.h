/* The emulated driver: its types, and what its files offer each other.
 *
 * Theory of operation. Device memory is a file below $TRIMS_TEST_CUDA_DIR (best on tmpfs) that the
 * process maps, so that a device address is an address the CPU can read: tests look at it through
 * tensors on torch's CPU device. All of the state that processes share is in those files and in the
 * flocks on them (registry.c); everything else here is one process's.
 *
 *   machine.c    what the environment says the machine is          } also in the emulated NVML
 *   registry.c   device memory that all processes see and count    }
 *   process.c    cuInit, the check every call begins with, reset
 *   faults.c     failures that a test ordered
 *   symbols.c    cuGetProcAddress
 *   errors.c     names of results
 *   devices.c    device queries
 *   contexts.c   primary contexts and the current one of a thread
 *   streams.c    streams: one worker thread for each
 *   events.c     events, and stream capture modes
 *   copies.c     copies and fills, onto the streams
 *   space.c      the address space: what is mapped where, with which rights
 *   memory.c     cuMemCreate and its relatives
 *   linear.c     cuMemAlloc and legacy IPC
 *   host.c       pinned and registered host memory
 *   pointers.c   cuPointerGetAttribute
 *
 * Locks, in the order they may be taken: lifetimes_lock (contexts.c), streams_lock, contexts_lock,
 * the registry's file lock.
 * With space_lock or one of the others held, none of these is taken.
 *
 * Where CUDA's documentation leaves open what a wrong call does, the answer here is an error, so
 * that nothing comes to rely on it. The types repeat cuda.h of CUDA 13.0, which need not be there.
 */
#ifndef EMULATOR_H
#define EMULATOR_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "machine.h"

#define EXPORT __attribute__((visibility("default")))
#define DRIVER_VERSION 13000

/* --- cuda.h ----------------------------------------------------------------------------------- */

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef uint64_t CUmemGenericAllocationHandle;
typedef struct context *CUcontext;
typedef struct stream *CUstream;
typedef struct event *CUevent;

typedef struct {
    unsigned char bytes[16];
} CUuuid;

typedef struct {
    int type;
    int id;
} CUmemLocation;

typedef struct {
    int type;
    int requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType;
        unsigned char gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;

typedef struct {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;

typedef struct {
    char reserved[64];
} CUipcMemHandle;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_DEVICE_UNAVAILABLE = 46,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217,
    CUDA_ERROR_OPERATING_SYSTEM = 304,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_UNKNOWN = 999,
};

enum { CU_MEM_ALLOCATION_TYPE_PINNED = 1 };
enum { CU_MEM_LOCATION_TYPE_DEVICE = 1 };
enum { CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1 };
enum {
    CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK = 1,
    CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED = 2,
};
enum {
    CU_MEM_ACCESS_FLAGS_PROT_NONE = 0,
    CU_MEM_ACCESS_FLAGS_PROT_READ = 1,
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
};

/* --- process.c -------------------------------------------------------------------------------- */

struct process {
    struct machine machine;
    /* Index into machine.devices of each device that CUDA_VISIBLE_DEVICES shows. */
    int visible[MAX_DEVICES];
    int visible_count;
    /* Grows with every reset: what a thread remembers of an earlier one is void. */
    unsigned generation;
};

extern struct process process;

/* NOT_INITIALIZED before cuInit and in a forked child, or the failure that a test ordered. */
CUresult process_enter(const char *call);

#define ENTER()                                     \
    do {                                            \
        CUresult entered = process_enter(__func__); \
        if (entered != CUDA_SUCCESS)                \
            return entered;                         \
    } while (0)

/* --- faults.c --------------------------------------------------------------------------------- */

void faults_read(void);
CUresult faults_check(const char *call);

/* --- devices.c -------------------------------------------------------------------------------- */

/* NULL when there is no such device in this process. */
const struct device *device_at(int ordinal);
/* The number of a device in this process, -1 when it is not visible. */
int device_ordinal(const char *id);
bool devices_are_peers(int one, int other);

/* --- contexts.c ------------------------------------------------------------------------------- */

/* The current context of this thread, when it is one that work can be given to. */
CUresult context_current(CUcontext *context);
/* Whether it is active and nothing illegal has happened in it. */
CUresult context_check(CUcontext context);
int context_device(CUcontext context);
/* An illegal access: every later call in this context fails. */
void context_poison(CUcontext context, CUresult why);
unsigned contexts_active(void);
void contexts_reset(void);

/* --- streams.c -------------------------------------------------------------------------------- */

/* Runs on the stream's thread; what it returns poisons the context unless it is a success. */
typedef CUresult (*work)(void *argument);

/* Queue work on a stream of the current context (NULL: its default stream). ``argument`` is freed,
 * after the work or when there is an error. ``is_awaited``: return when it is done. */
CUresult stream_submit(CUstream stream, work run, void *argument, bool is_awaited);
CUresult streams_synchronize(CUcontext context);
/* Ends the threads of a context's streams after what they have to do. */
void streams_destroy(CUcontext context);
unsigned streams_count(void);
unsigned events_count(void);
void streams_reset(void);

/* --- space.c ---------------------------------------------------------------------------------- */

enum region_kind { REGION_VMM, REGION_LINEAR, REGION_IMPORTED };

/* Device memory that is mapped into this process. */
struct region {
    struct region *next;
    uint64_t address;
    uint64_t bytes;
    enum region_kind kind;
    int ordinal;                       /* of the device that has the memory */
    unsigned char access[MAX_DEVICES]; /* CU_MEM_ACCESS_FLAGS of each visible device */
    void *owner;                       /* struct allocation or struct linear */
};

enum reach { REACH_UNMAPPED, REACH_FORBIDDEN, REACH_ALLOWED };

extern pthread_rwlock_t space_lock;

/* All of these want space_lock: for writing where they change something. */
struct region *space_find(uint64_t address);
struct region *space_first(void);
/* As far as the device of this number may, which does the work. */
enum reach space_reach(uint64_t address, uint64_t bytes, bool is_write, int ordinal);
/* Address space without rights, which no child inherits; 0 when there is none. */
uint64_t space_reserve(uint64_t bytes, uint64_t alignment, uint64_t hint);
/* Put the beginning of a file over reserved address space, without rights. */
struct region *space_map(uint64_t address, uint64_t bytes, int descriptor, uint64_t offset);
/* Give a region the rights that the most permitted device has. */
void space_protect(const struct region *region);
/* Reserved address space again. */
void space_unmap(struct region *region);
void space_release(uint64_t address, uint64_t bytes);
unsigned space_count(enum region_kind kind);
/* Forgets the regions; the mappings stay. */
void space_forget(void);

/* --- memory.c, linear.c, host.c --------------------------------------------------------------- */

unsigned memory_handles(void);
unsigned memory_reservations(void);
void memory_reset(void);
void linear_release_context(int ordinal);
void linear_reset(void);
/* The first byte and size of the pinned range that holds all of this; false when none does. */
bool host_find(uint64_t address, uint64_t bytes, uint64_t *start, uint64_t *size);
unsigned host_count(void);
void host_reset(void);

#endif
