/* Failures that a test ordered: TRIMS_TEST_CUDA_FAIL="cuMemCreate:2,cuMemcpyHtoDAsync:3+=kill".
 *
 * CALL[:N[+]][=RESULT]: the N-th call in this process, with + all from then on, without N every
 * call. RESULT is a CUresult, "kill" or "hang"; a call has the name without _v2.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "emulator.h"

enum action { ACTION_RESULT, ACTION_KILL, ACTION_HANG };

struct fault {
    char call[48];
    unsigned first, last; /* calls that fail, from 1 */
    unsigned seen;
    enum action action;
    CUresult result;
};

#define MAX_FAULTS 16
static struct fault faults[MAX_FAULTS];
static int fault_count;
static pthread_mutex_t faults_lock = PTHREAD_MUTEX_INITIALIZER;

static size_t base_length(const char *call) {
    const char *suffix = strstr(call, "_v");
    return suffix != NULL ? (size_t)(suffix - call) : strlen(call);
}

static CUresult usual_failure(const char *call) {
    static const char *const allocate[] = {"cuMemCreate", "cuMemAlloc", "cuMemHostAlloc",
                                           "cuMemAllocHost", "cuMemAddressReserve"};
    for (size_t i = 0; i < sizeof allocate / sizeof *allocate; i++)
        if (strcmp(call, allocate[i]) == 0)
            return CUDA_ERROR_OUT_OF_MEMORY;
    return CUDA_ERROR_UNKNOWN;
}

static void read_one(char *text) {
    struct fault *fault = &faults[fault_count];
    memset(fault, 0, sizeof *fault);
    char *result = strchr(text, '='), *when;
    if (result != NULL)
        *result++ = '\0';
    when = strchr(text, ':');
    if (when != NULL)
        *when++ = '\0';
    snprintf(fault->call, sizeof fault->call, "%s", text);
    fault->first = when != NULL ? (unsigned)strtoul(when, NULL, 10) : 1;
    bool is_once = when != NULL && strchr(when, '+') == NULL;
    fault->last = is_once ? fault->first : ~0u;
    if (result == NULL)
        fault->result = usual_failure(fault->call);
    else if (strcmp(result, "kill") == 0)
        fault->action = ACTION_KILL;
    else if (strcmp(result, "hang") == 0)
        fault->action = ACTION_HANG;
    else
        fault->result = atoi(result);
    fault_count++;
}

void faults_read(void) {
    const char *value = getenv("TRIMS_TEST_CUDA_FAIL");
    pthread_mutex_lock(&faults_lock);
    fault_count = 0;
    char *copy = strdup(value != NULL ? value : ""), *rest = copy;
    for (char *entry; copy != NULL && (entry = strsep(&rest, ",")) != NULL;)
        if (*entry != '\0' && fault_count < MAX_FAULTS)
            read_one(entry);
    free(copy);
    pthread_mutex_unlock(&faults_lock);
}

CUresult faults_check(const char *call) {
    struct fault found = {.action = ACTION_RESULT, .result = CUDA_SUCCESS};
    size_t length = base_length(call);
    pthread_mutex_lock(&faults_lock);
    for (int i = 0; i < fault_count; i++) {
        struct fault *fault = &faults[i];
        if (strlen(fault->call) != length || strncmp(fault->call, call, length) != 0)
            continue;
        fault->seen++;
        if (fault->seen >= fault->first && fault->seen <= fault->last)
            found = *fault;
    }
    pthread_mutex_unlock(&faults_lock);
    if (found.action == ACTION_KILL)
        raise(SIGKILL);
    while (found.action == ACTION_HANG)
        pause();
    return found.result;
}
