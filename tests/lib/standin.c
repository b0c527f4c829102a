/* Stands in for libnvidia-ml.so.1, so that the real nvidia-ml-py runs without a GPU.
 *
 * What it answers is read, at every call, from lines "KEY VALUE" of the file $NVML_STANDIN (the last line of a key
 * counts). Every key can be for one GPU, or one link (field scope, memory error type, cause) of it: temperature,
 * temperature.3, link.3.5. Without the variable there is no driver (nvmlInit says so).
 *
 *   nvmlDeviceGetTemperature 15     the function returns this code (name of nvml.h without _v3 etc., but MemoryInfo_v2)
 *   nvmlInit hang                   it does not return as long as the line is there
 *   missing.3 1                     GPU 3 is of another job: NVML_ERROR_NO_PERMISSION for its handle
 *   count, links (per GPU), link (1 up, 0 down, -1 not there), uuid, minor, domain, bus, action (recovery action),
 *   field<ID> (any other field value; 3 = not supported without), ecc.GPU.TYPE (0 corrected, 1 uncorrected),
 *   remap_pending, remap_failed, remapped, reasons (of clocks), temperature,
 *   temperature_limit, used (MiB), reserved (MiB), processes (PID:MIB,...), persistence, driver, fabric_state,
 *   fabric_status, fabric_health, cluster_uuid (each byte of it)
 *
 * A told failure or hang that was met is written to $NVML_STANDIN.met, one name a line.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NONE (-1L)
#define SUCCESS 0
#define NOT_SUPPORTED 3
#define NO_PERMISSION 4
#define INSUFFICIENT_SIZE 7
#define DRIVER_NOT_LOADED 9
#define MIB (1ULL << 20)

typedef unsigned long long u64;

static int find(const char *key, char *value)
{
    char name[96], word[256];
    int found = 0;
    FILE *file = fopen(getenv("NVML_STANDIN"), "r");
    if (!file)
        return 0;
    while (fscanf(file, "%95s %255s", name, word) == 2)
        if (!strcmp(name, key)) {
            strcpy(value, word);
            found = 1;
        }
    fclose(file);
    return found;
}

/* The value of key.gpu.part, key.gpu or key, in this order. */
static int told(const char *key, long gpu, long part, char *value)
{
    char name[96];
    snprintf(name, sizeof name, "%s.%ld.%ld", key, gpu, part);
    if (gpu != NONE && part != NONE && find(name, value))
        return 1;
    snprintf(name, sizeof name, "%s.%ld", key, gpu);
    if (gpu != NONE && find(name, value))
        return 1;
    return find(key, value);
}

static long number(const char *key, long gpu, long part, long otherwise)
{
    char value[256];
    return told(key, gpu, part, value) ? strtol(value, NULL, 0) : otherwise;
}

static void met(const char *function)
{
    char path[4096];
    FILE *file;
    snprintf(path, sizeof path, "%s.met", getenv("NVML_STANDIN"));
    file = fopen(path, "a");
    if (file) {
        fprintf(file, "%s\n", function);
        fclose(file);
    }
}

static int outcome(const char *function, long gpu, long part)
{
    char value[256];
    int first = 1;
    if (!getenv("NVML_STANDIN"))
        return DRIVER_NOT_LOADED;
    while (told(function, gpu, part, value) && !strcmp(value, "hang")) {
        if (first)
            met(function);
        first = 0;
        usleep(10000);
    }
    if (!told(function, gpu, part, value) || !strcmp(value, "hang"))
        return SUCCESS;
    met(function);
    return (int)strtol(value, NULL, 0);
}

#define GPU(handle) ((long)(handle)-1)
#define BEGIN(function, gpu, part) \
    do { \
        int code = outcome(function, gpu, part); \
        if (code) \
            return code; \
    } while (0)

int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    return outcome("nvmlInit", NONE, NONE);
}

int nvmlShutdown(void) { return outcome("nvmlShutdown", NONE, NONE); }

const char *nvmlErrorString(int code)
{
    static char text[32];
    snprintf(text, sizeof text, "stand-in error %d", code);
    return text;
}

int nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    char value[256] = "570.86.15";
    BEGIN("nvmlSystemGetDriverVersion", NONE, NONE);
    told("driver", NONE, NONE, value);
    snprintf(version, length, "%s", value);
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    BEGIN("nvmlDeviceGetCount", NONE, NONE);
    *count = number("count", NONE, NONE, 2);
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    if (number("missing", index, NONE, 0))
        return NO_PERMISSION;
    BEGIN("nvmlDeviceGetHandleByIndex", index, NONE);
    *handle = (void *)(long)(index + 1);
    return SUCCESS;
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned length)
{
    char value[256];
    BEGIN("nvmlDeviceGetUUID", GPU(handle), NONE);
    snprintf(value, sizeof value, "GPU-%ld000", GPU(handle));
    told("uuid", GPU(handle), NONE, value);
    snprintf(uuid, length, "%s", value);
    return SUCCESS;
}

int nvmlDeviceGetMinorNumber(void *handle, unsigned *minor)
{
    BEGIN("nvmlDeviceGetMinorNumber", GPU(handle), NONE);
    *minor = number("minor", GPU(handle), NONE, GPU(handle));
    return SUCCESS;
}

struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };

int nvmlDeviceGetPciInfo_v3(void *handle, struct pci *pci)
{
    BEGIN("nvmlDeviceGetPciInfo", GPU(handle), NONE);
    memset(pci, 0, sizeof *pci);
    pci->domain = number("domain", GPU(handle), NONE, 0);
    pci->bus = number("bus", GPU(handle), NONE, GPU(handle));
    return SUCCESS;
}

struct field { unsigned id, scope; long long time, latency; int type, result; union { unsigned u; u64 ull; } value; };

int nvmlDeviceGetFieldValues(void *handle, int count, struct field *fields)
{
    BEGIN("nvmlDeviceGetFieldValues", GPU(handle), NONE);
    for (int i = 0; i < count; i++) {
        char key[32], value[256];
        snprintf(key, sizeof key, "field%u", fields[i].id);
        if (fields[i].id == 230)
            strcpy(key, "action");
        fields[i].type = 3; /* unsigned long long */
        fields[i].value.ull = 0;
        fields[i].result = fields[i].id == 230 ? SUCCESS : NOT_SUPPORTED;
        if (told(key, GPU(handle), fields[i].scope, value)) {
            fields[i].value.ull = strtoull(value, NULL, 0);
            fields[i].result = SUCCESS;
        }
        snprintf(key, sizeof key, "result%u", fields[i].id);
        fields[i].result = number(key, GPU(handle), fields[i].scope, fields[i].result);
    }
    return SUCCESS;
}

int nvmlDeviceGetNvLinkState(void *handle, unsigned link, unsigned *active)
{
    long there = link < (unsigned long)number("links", GPU(handle), NONE, 2);
    long state = number("link", GPU(handle), link, there ? 1 : -1);
    if (state < 0)
        return NOT_SUPPORTED;
    BEGIN("nvmlDeviceGetNvLinkState", GPU(handle), link);
    *active = state > 0;
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(void *handle, int type, int counter, u64 *count)
{
    (void)counter;
    BEGIN("nvmlDeviceGetTotalEccErrors", GPU(handle), type);
    *count = number("ecc", GPU(handle), type, 0);
    return SUCCESS;
}

int nvmlDeviceGetRemappedRows(void *handle, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                              unsigned *failed)
{
    BEGIN("nvmlDeviceGetRemappedRows", GPU(handle), NONE);
    *corrected = 0;
    *uncorrected = number("remapped", GPU(handle), NONE, 0);
    *pending = number("remap_pending", GPU(handle), NONE, 0);
    *failed = number("remap_failed", GPU(handle), NONE, 0);
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(void *handle, u64 *reasons)
{
    BEGIN("nvmlDeviceGetCurrentClocksEventReasons", GPU(handle), NONE);
    *reasons = number("reasons", GPU(handle), NONE, 1);
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, u64 *reasons)
{
    BEGIN("nvmlDeviceGetCurrentClocksThrottleReasons", GPU(handle), NONE);
    *reasons = number("reasons", GPU(handle), NONE, 1);
    return SUCCESS;
}

int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *celsius)
{
    (void)sensor;
    BEGIN("nvmlDeviceGetTemperature", GPU(handle), NONE);
    *celsius = number("temperature", GPU(handle), NONE, 34);
    return SUCCESS;
}

int nvmlDeviceGetTemperatureThreshold(void *handle, int threshold, unsigned *celsius)
{
    (void)threshold;
    BEGIN("nvmlDeviceGetTemperatureThreshold", GPU(handle), NONE);
    *celsius = number("temperature_limit", GPU(handle), NONE, 87);
    return SUCCESS;
}

struct memory_v2 { unsigned version; u64 total, reserved, free, used; };

int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *memory)
{
    BEGIN("nvmlDeviceGetMemoryInfo_v2", GPU(handle), NONE);
    memory->total = 81559 * MIB;
    memory->reserved = number("reserved", GPU(handle), NONE, 600) * MIB;
    memory->used = number("used", GPU(handle), NONE, 4) * MIB;
    memory->free = memory->total - memory->used - memory->reserved;
    return SUCCESS;
}

struct process { unsigned pid; u64 used; unsigned instance, compute; };

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, struct process *processes)
{
    char value[256] = "";
    unsigned room = *count, n = 0;
    BEGIN("nvmlDeviceGetComputeRunningProcesses", GPU(handle), NONE);
    told("processes", GPU(handle), NONE, value);
    for (char *rest = value, *word; (word = strtok_r(rest, ",", &rest)); n++)
        if (processes && n < room) {
            char *after;
            processes[n].pid = strtol(word, &after, 10);
            processes[n].used = *after ? strtoull(after + 1, NULL, 10) * MIB : 0;
            processes[n].instance = processes[n].compute = ~0u;
        }
    *count = n;
    return n > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetPersistenceMode(void *handle, int *mode)
{
    BEGIN("nvmlDeviceGetPersistenceMode", GPU(handle), NONE);
    *mode = number("persistence", GPU(handle), NONE, 1);
    return SUCCESS;
}

struct fabric { unsigned version; unsigned char cluster[16]; int status; unsigned clique; unsigned char state; unsigned health; };

int nvmlDeviceGetGpuFabricInfoV(void *handle, struct fabric *fabric)
{
    BEGIN("nvmlDeviceGetGpuFabricInfoV", GPU(handle), NONE);
    memset(fabric->cluster, number("cluster_uuid", GPU(handle), NONE, 0), sizeof fabric->cluster);
    fabric->clique = 0;
    fabric->state = number("fabric_state", GPU(handle), NONE, 3);
    fabric->status = number("fabric_status", GPU(handle), NONE, 0);
    fabric->health = number("fabric_health", GPU(handle), NONE, 0);
    return SUCCESS;
}
