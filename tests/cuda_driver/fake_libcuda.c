/* A libcuda.so.1 whose device is this process: enough of the driver's interface for aiograd's bindings to run against, through NVIDIA's own
 * Python package. Memory is malloc'ed, work is done when asked for, kernels write down their arguments in the first pointer they get:
 * "add_one" is the only one that computes, any other does nothing. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
#define OK 0
#define EXPORT __attribute__((visibility("default")))

static long live_device, live_host, live_streams, live_events, launches, host_calls, current_set;
static __thread void *current;

EXPORT long fake_count(const char *what)
{
    if (!strcmp(what, "device")) return live_device;
    if (!strcmp(what, "host")) return live_host;
    if (!strcmp(what, "streams")) return live_streams;
    if (!strcmp(what, "events")) return live_events;
    if (!strcmp(what, "launches")) return launches;
    return host_calls;
}

#define NEED_CONTEXT if (!current) return 201

EXPORT CUresult cuInit(unsigned flags) { return OK; }
EXPORT CUresult cuDriverGetVersion(int *version) { *version = 13000; return OK; }
EXPORT CUresult cuGetErrorString(CUresult e, const char **text) { *text = e == 201 ? "invalid device context" : e == 2 ? "out of memory" : "an error"; return OK; }
EXPORT CUresult cuGetErrorName(CUresult e, const char **text) { *text = "CUDA_ERROR"; return OK; }
EXPORT CUresult cuDeviceGet(int *device, int ordinal) { if (ordinal) return 101; *device = 0; return OK; }
EXPORT CUresult cuDeviceGetCount(int *count) { *count = 1; return OK; }
EXPORT CUresult cuDeviceGetName(char *name, int len, int device) { snprintf(name, len, "Fake 9000"); return OK; }
EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, int device)
{
    switch (attribute) {
    case 16: *value = 12; break;    /* multiprocessors */
    case 75: *value = 9; break;     /* capability, major */
    case 76: *value = 0; break;     /* and minor */
    case 8: *value = 49152; break;  /* shared memory of a block */
    default: *value = -attribute;
    }
    return OK;
}
EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 1ul << 30; return OK; }
EXPORT CUresult cuDevicePrimaryCtxRetain(void **ctx, int device) { *ctx = (void *)0x1234; return OK; }
EXPORT CUresult cuDevicePrimaryCtxRelease_v2(int device) { return OK; }
EXPORT CUresult cuCtxSetCurrent(void *ctx) { current = ctx; current_set++; return OK; }
EXPORT CUresult cuCtxPushCurrent_v2(void *ctx) { current = ctx; return OK; }
EXPORT CUresult cuCtxPopCurrent_v2(void **ctx) { *ctx = current; current = NULL; return OK; }
EXPORT CUresult cuCtxSynchronize(void) { NEED_CONTEXT; return OK; }
EXPORT CUresult cuMemGetInfo_v2(size_t *free, size_t *total) { *free = 1000; *total = 1ul << 30; return OK; }
EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *p, size_t n)
{
    NEED_CONTEXT;
    if (n > 1ul << 30) return 2;
    *p = (CUdeviceptr)aligned_alloc(512, n);
    memset((void *)*p, 0xff, n < 1 << 20 ? n : 1 << 20);
    live_device++;
    return OK;
}
EXPORT CUresult cuMemFree_v2(CUdeviceptr p) { free((void *)p); live_device--; return OK; }
EXPORT CUresult cuMemHostAlloc(void **p, size_t n, unsigned flags) { NEED_CONTEXT; if (flags != 1) return 1; *p = aligned_alloc(4096, n); live_host++; return OK; }
EXPORT CUresult cuMemFreeHost(void *p) { free(p); live_host--; return OK; }
EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr d, const void *h, size_t n, void *s) { if (!s) return 400; memcpy((void *)d, h, n); return OK; }
EXPORT CUresult cuMemcpyDtoHAsync_v2(void *h, CUdeviceptr d, size_t n, void *s) { if (!s) return 400; memcpy(h, (void *)d, n); return OK; }
EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr t, CUdeviceptr d, size_t n, void *s) { if (!s) return 400; memcpy((void *)t, (void *)d, n); return OK; }
EXPORT CUresult cuMemsetD8Async(CUdeviceptr d, unsigned char c, size_t n, void *s) { if (!s) return 400; memset((void *)d, c, n); return OK; }
EXPORT CUresult cuStreamCreateWithPriority(void **s, unsigned flags, int priority) { if (flags != 1) return 1; *s = malloc(16); live_streams++; return OK; }
EXPORT CUresult cuStreamDestroy_v2(void *s) { free(s); live_streams--; return OK; }
EXPORT CUresult cuStreamWaitEvent(void *s, void *e, unsigned flags) { return s && e && !flags ? OK : 400; }
struct event { int flags, recorded; };
EXPORT CUresult cuEventCreate(void **e, unsigned flags) { struct event *v = calloc(1, sizeof *v); v->flags = flags; *e = v; live_events++; return OK; }
EXPORT CUresult cuEventDestroy_v2(void *e) { free(e); live_events--; return OK; }
EXPORT CUresult cuEventRecord(void *e, void *s) { if (!s) return 400; ((struct event *)e)->recorded = 1; return OK; }
EXPORT CUresult cuEventQuery(void *e) { return ((struct event *)e)->recorded ? OK : 600; }
EXPORT CUresult cuEventSynchronize(void *e) { return OK; }
EXPORT CUresult cuEventElapsedTime_v2(float *ms, void *a, void *b) { if (((struct event *)a)->flags & 2) return 400; *ms = 1.5f; return OK; }
EXPORT CUresult cuEventElapsedTime(float *ms, void *a, void *b) { return cuEventElapsedTime_v2(ms, a, b); }
static void *host_function;
EXPORT void *fake_host_function(void) { return host_function; }
EXPORT CUresult cuLaunchHostFunc(void *s, void (*f)(void *), void *data) { if (!s) return 400; host_calls++; host_function = f; f(data); return OK; }
EXPORT CUresult cuModuleLoadData(void **module, const void *image) { return memcmp(image, "\177ELF", 4) ? 200 : (*module = (void *)0x5678, OK); }
EXPORT CUresult cuModuleGetFunction(void **f, void *module, const char *name) { *f = strdup(name); return OK; }
EXPORT CUresult cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                               void *stream, void **params, void **extra)
{
    NEED_CONTEXT;
    if (!stream || shared || extra) return 1;
    launches++;
    if (strstr(f, "add_one")) { /* (n: int64, out: float32*, step: float32), one thread for each element */
        int64_t n = *(int64_t *)params[0];
        float *out = *(float **)params[1], step = *(float *)params[2];
        for (int64_t i = 0; i < n && i < (int64_t)gx * bx; i++) out[i] += step;
    }
    return OK;
}

/* The newest names first, as the real one resolves them. */
EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **pfn, int version, uint64_t flags, int *status)
{
    char name[128];
    for (int v = 4; v > 0; v--) {
        snprintf(name, sizeof name, v > 1 ? "%s_v%d" : "%s", symbol, v);
        if ((*pfn = dlsym(RTLD_DEFAULT, name)) || (*pfn = dlsym(dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_NOW), name))) {
            if (status) *status = 0;
            return OK;
        }
    }
    if (status) *status = 1;
    return 500;
}
EXPORT CUresult cuGetProcAddress(const char *symbol, void **pfn, int version, uint64_t flags) { return cuGetProcAddress_v2(symbol, pfn, version, flags, NULL); }
