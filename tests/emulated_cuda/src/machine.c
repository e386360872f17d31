/* Reads the description of the machine from the environment, and CUDA_VISIBLE_DEVICES. */
#include "machine.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PREFIX "TRIMS_TEST_CUDA_"
#define DEFAULT_MEMORY_BYTES ((uint64_t)1 << 30)

static const char *setting(const char *name) {
    char full[64];
    snprintf(full, sizeof full, PREFIX "%s", name);
    const char *value = getenv(full);
    return value != NULL && *value != '\0' ? value : NULL;
}

static long number(const char *name, long otherwise) {
    const char *value = setting(name);
    return value != NULL ? strtol(value, NULL, 10) : otherwise;
}

/* The part of a list at an index; a list of one stands for all. False when there is no such part.
 */
static bool part(const char *list, int index, char *into, size_t size) {
    if (list == NULL)
        return false;
    const char *start = list;
    if (strchr(list, ',') != NULL)
        for (; index > 0; index--) {
            start = strchr(start, ',');
            if (start == NULL)
                return false;
            start++;
        }
    snprintf(into, size, "%.*s", (int)strcspn(start, ","), start);
    return true;
}

/* Ids are the same on every emulated machine, so that a test can name a device before it exists.
 * Their first digits differ: an id may be abbreviated in CUDA_VISIBLE_DEVICES. */
static void uuid_of(int number, unsigned char uuid[16]) {
    uint32_t first = (uint32_t)(number + 1) * 0x9e3779b9u;
    const unsigned char rest[12] = {0x7e, 0x57, 0x4c, 0xda, 0x80, 0, 0, 0, 0, 0, 0, 0};
    for (int i = 0; i < 4; i++)
        uuid[i] = (unsigned char)(first >> (24 - 8 * i));
    memcpy(uuid + 4, rest, sizeof rest);
    uuid[15] = (unsigned char)number;
}

static void write_id(const char *kind, const unsigned char u[16], char id[48]) {
    snprintf(id, 48, "%s-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
             kind, u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12],
             u[13], u[14], u[15]);
}

void machine_gpu(int gpu, struct device *device) {
    char text[80];
    memset(device, 0, sizeof *device);
    device->gpu = gpu;
    uuid_of(gpu * 16, device->uuid);
    memcpy(device->gpu_uuid, device->uuid, sizeof device->uuid);
    write_id("GPU", device->uuid, device->id);
    bool is_named = part(setting("NAMES"), gpu, text, sizeof text);
    snprintf(device->name, sizeof device->name, "%s", is_named ? text : "Emulated GPU");
    device->total_bytes = DEFAULT_MEMORY_BYTES;
    if (part(setting("MEMORY_BYTES"), gpu, text, sizeof text))
        device->total_bytes = strtoull(text, NULL, 10);
}

static void cut(struct device *device, int instance, int instances) {
    size_t length = strlen(device->name);
    device->instance = instance;
    uuid_of(device->gpu * 16 + instance, device->uuid);
    write_id("MIG", device->uuid, device->id);
    /* The form of "NVIDIA A100-SXM4-40GB MIG 1g.5gb". */
    snprintf(device->name + length, sizeof device->name - length, " MIG 1g.%dgb",
             (int)(device->total_bytes / (uint64_t)instances >> 30));
    device->total_bytes = device->total_bytes / (uint64_t)instances / GRANULARITY * GRANULARITY;
}

bool machine_read(struct machine *machine) {
    memset(machine, 0, sizeof *machine);
    const char *directory = setting("DIR");
    long instances = number("MIG", 0);
    machine->gpu_count = (int)number("DEVICES", 1);
    int each = instances > 0 ? (int)instances : 1;
    if (directory == NULL || strlen(directory) >= sizeof machine->directory ||
        machine->gpu_count < 1 || machine->gpu_count * each > MAX_DEVICES || each > 15)
        return false;
    strcpy(machine->directory, directory);
    machine->is_mig = instances > 0;
    machine->has_nvml = number("NVML", 1) != 0;
    machine->has_peer_access = number("PEER", 1) != 0;
    machine->loses_peer_copies = number("PEER", 1) == 2;
    machine->can_share = number("VMM", 1) != 0;
    machine->is_exclusive = number("EXCLUSIVE", 0) != 0;
    machine->has_mps = number("MPS", 0) != 0;
    machine->context_bytes = (uint64_t)number("CONTEXT_BYTES", 0);
    machine->copy_delay_ms = number("COPY_DELAY_MS", 0);
    for (int gpu = 0; gpu < machine->gpu_count; gpu++) {
        char text[16];
        bool is_ordered = part(setting("NVML_ORDER"), gpu, text, sizeof text);
        machine->nvml_order[gpu] = is_ordered ? atoi(text) % machine->gpu_count : gpu;
        for (int instance = 1; instance <= each; instance++) {
            struct device *device = &machine->devices[machine->device_count++];
            machine_gpu(gpu, device);
            if (machine->is_mig)
                cut(device, instance, each);
        }
    }
    return true;
}

/* --- CUDA_VISIBLE_DEVICES --------------------------------------------------------------------- */

/* The only device that this may abbreviate, or -1. */
static int find_id(const struct machine *machine, const char *id) {
    int found = -1;
    for (int i = 0; i < machine->device_count; i++) {
        struct device gpu;
        machine_gpu(machine->devices[i].gpu, &gpu);
        bool is_device = strncmp(machine->devices[i].id, id, strlen(id)) == 0;
        /* The id of a GPU that is cut into instances stands for the first of these. */
        bool is_parent = machine->devices[i].instance == 1 && strncmp(gpu.id, id, strlen(id)) == 0;
        if (!is_device && !is_parent)
            continue;
        if (found >= 0)
            return -1;
        found = i;
    }
    return found;
}

static int find_number(const struct machine *machine, const char *text) {
    char *end;
    long ordinal = strtol(text, &end, 10);
    if (end == text || ordinal < 0 || ordinal >= machine->gpu_count)
        return -1;
    for (int i = 0; i < machine->device_count; i++)
        if (machine->devices[i].gpu == ordinal)
            return i;
    return -1;
}

/* The driver's rules, as torch/cuda/__init__.py (_parse_visible_devices) has them: the first entry
 * that names no device ends the list, and a device that is named twice makes all of it void. */
int machine_visible(const struct machine *machine, int *indices) {
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    int count = 0;
    if (list == NULL) {
        for (int i = 0; i < machine->device_count; i++)
            indices[count++] = i;
    } else {
        char *copy = strdup(list), *rest = copy;
        for (char *entry; copy != NULL && (entry = strsep(&rest, ",")) != NULL;) {
            entry += strspn(entry, " ");
            bool is_id = strncmp(entry, "GPU-", 4) == 0 || strncmp(entry, "MIG-", 4) == 0;
            int found = is_id ? find_id(machine, entry) : find_number(machine, entry);
            if (found < 0)
                break;
            for (int i = 0; i < count; i++)
                if (indices[i] == found) {
                    free(copy);
                    return 0;
                }
            indices[count++] = found;
        }
        free(copy);
    }
    /* "A single CUDA process can only enumerate a single MIG device" (NVIDIA's MIG User Guide). */
    return machine->is_mig && count > 1 ? 1 : count;
}
