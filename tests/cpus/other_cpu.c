/* The BLAS and libm of a CPU that nobody has, loaded before the real ones (LD_PRELOAD), as a code path of its own.
 *
 * It replaces what numpy takes from its OpenBLAS for products, and libm's functions where numpy calls them. Sums are made in an order that
 * depends on the routine, on how its arguments lie in memory, on their size and on the place in the result, as it may in any BLAS;
 * functions are off by a unit in the last place for half of their arguments. So two results are equal to the bit only if they were
 * calculated alike, and a test that passes by the luck of one CPU's kernels fails.
 */
#define _GNU_SOURCE
#include <complex.h>
#include <dlfcn.h>
#include <link.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLAS(name) scipy_cblas_##name##64_

typedef int64_t Size;
enum { ROWS = 101, PLAIN = 111, CONJUGATED = 113, UPPER = 121 };

static unsigned order_of(uint64_t routine, uint64_t layout, uint64_t size, uint64_t edge)
{
    return (((routine * 31 + layout) * 31 + size) * 31 + edge) * 0x9E3779B97F4A7C15ull >> 62;
}

/* The sum of `term`, which depends on k: forwards, backwards, the even ones first, or in eight lanes. */
#define SUM(T, count, order, term) ({ \
    T sum = 0, odd = 0, lanes[8] = {0}; \
    switch (order) { \
    case 0: for (Size k = 0; k < (count); k++) sum = sum + (term); break; \
    case 1: for (Size k = (count) - 1; k >= 0; k--) sum = sum + (term); break; \
    case 2: \
        for (Size k = 0; k < (count); k += 2) sum = sum + (term); \
        for (Size k = 1; k < (count); k += 2) odd = odd + (term); \
        sum = sum + odd; \
        break; \
    default: \
        for (Size k = 0; k < (count); k++) lanes[k % 8] = lanes[k % 8] + (term); \
        sum = ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7])); \
    } \
    sum; })

#define PUT(target, alpha, sum, beta) (target) = (alpha) * (sum) + ((beta) == 0 ? 0 : (beta) * (target))

/* p: letter, T: type, S: how a scalar is passed, GET: its value, CONJ: the conjugate */
#define PRODUCTS(p, T, S, GET, CONJ) \
    void BLAS(p##gemm)(int layout, int ta, int tb, Size m, Size n, Size depth, S alpha, const T *a, Size lda, const T *b, Size ldb, S beta, \
                       T *c, Size ldc) \
    { \
        int rows = layout == ROWS, a_rows = rows == (ta == PLAIN), b_rows = rows == (tb == PLAIN); \
        for (Size i = 0; i < m; i++) \
            for (Size j = 0; j < n; j++) { \
                unsigned order = order_of(1, a_rows + 2 * b_rows + 4 * rows, (m > 16) + 2 * (n > 5), (i >= m - m % 4) + 2 * (j >= n - n % 4)); \
                T sum = SUM(T, depth, order, ({ \
                    T x = a[a_rows ? i * lda + k : k * lda + i], y = b[b_rows ? k * ldb + j : j * ldb + k]; \
                    (ta == CONJUGATED ? CONJ(x) : x) * (tb == CONJUGATED ? CONJ(y) : y); })); \
                PUT(c[rows ? i * ldc + j : j * ldc + i], GET(alpha), sum, GET(beta)); \
            } \
    } \
    void BLAS(p##gemv)(int layout, int ta, Size m, Size n, S alpha, const T *a, Size lda, const T *x, Size step, S beta, T *y, Size y_step) \
    { \
        Size length = ta == PLAIN ? m : n, depth = ta == PLAIN ? n : m; \
        int rows = (layout == ROWS) == (ta == PLAIN); \
        x -= step < 0 ? (depth - 1) * step : 0; \
        y -= y_step < 0 ? (length - 1) * y_step : 0; \
        for (Size i = 0; i < length; i++) { \
            unsigned order = order_of(2, rows, length > 4, i >= length - length % 4); \
            T sum = SUM(T, depth, order, ({ T z = a[rows ? i * lda + k : k * lda + i]; (ta == CONJUGATED ? CONJ(z) : z) * x[k * step]; })); \
            PUT(y[i * y_step], GET(alpha), sum, GET(beta)); \
        } \
    } \
    void BLAS(p##syrk)(int layout, int half, int ta, Size n, Size depth, S alpha, const T *a, Size lda, S beta, T *c, Size ldc) \
    { \
        int rows = (layout == ROWS) == (ta == PLAIN); \
        for (Size i = 0; i < n; i++) \
            for (Size j = half == UPPER ? i : 0; j < (half == UPPER ? n : i + 1); j++) { \
                unsigned order = order_of(3, rows, n > 4, j >= n - n % 4); \
                T sum = SUM(T, depth, order, rows ? a[i * lda + k] * a[j * lda + k] : a[k * lda + i] * a[k * lda + j]); \
                PUT(c[layout == ROWS ? i * ldc + j : j * ldc + i], GET(alpha), sum, GET(beta)); \
            } \
    }

#define ITSELF(x) (x)
#define DOUBLE_COMPLEX(x) (*(const double complex *)(x))
#define FLOAT_COMPLEX(x) (*(const float complex *)(x))
PRODUCTS(s, float, float, ITSELF, ITSELF)
PRODUCTS(d, double, double, ITSELF, ITSELF)
PRODUCTS(c, float complex, const void *, FLOAT_COMPLEX, conjf)
PRODUCTS(z, double complex, const void *, DOUBLE_COMPLEX, conj)

#define INNER(T, CONJ) \
    x -= step < 0 ? (n - 1) * step : 0; \
    y -= y_step < 0 ? (n - 1) * y_step : 0; \
    T sum = SUM(T, n, order_of(4, (step != 1) + 2 * (y_step != 1), 0, 0), CONJ(x[k * step]) * y[k * y_step])
#define REAL_INNER(name, T) T BLAS(name)(Size n, const T *x, Size step, const T *y, Size y_step) { INNER(T, ITSELF); return sum; }
#define COMPLEX_INNER(name, T, CONJ) void BLAS(name)(Size n, const T *x, Size step, const T *y, Size y_step, T *out) { INNER(T, CONJ); *out = sum; }
REAL_INNER(sdot, float)
REAL_INNER(ddot, double)
COMPLEX_INNER(cdotu_sub, float complex, ITSELF)
COMPLEX_INNER(cdotc_sub, float complex, conjf)
COMPLEX_INNER(zdotu_sub, double complex, ITSELF)
COMPLEX_INNER(zdotc_sub, double complex, conj)

/* Where numpy's module lies in memory: Python's own `math` keeps the real functions. */
static uintptr_t first, last;

static int look(struct dl_phdr_info *module, size_t size, void *unused)
{
    if (!strstr(module->dlpi_name, "_multiarray_umath"))
        return 0;
    first = UINTPTR_MAX;
    for (int i = 0; i < module->dlpi_phnum; i++)
        if (module->dlpi_phdr[i].p_type == PT_LOAD) {
            uintptr_t start = module->dlpi_addr + module->dlpi_phdr[i].p_vaddr, end = start + module->dlpi_phdr[i].p_memsz;
            first = start < first ? start : first;
            last = end > last ? end : last;
        }
    return 1;
}

static int is_numpy(void *caller)
{
    static int asked;
    if (!last && asked++ < 100000)
        dl_iterate_phdr(look, NULL);
    return (uintptr_t)caller >= first && (uintptr_t)caller < last;
}

/* The next number up or down, for half of all numbers; those with few digits, which any libm gives exactly, stay. */
#define OFF(name, T, Bits, few) \
    static T name(T value) \
    { \
        Bits bits; \
        memcpy(&bits, &value, sizeof bits); \
        if (!isfinite(value) || value == 0 || !(bits & few) || !(bits >> 5 & 1)) \
            return value; \
        bits += bits >> 3 & 1 ? 1 : -1; \
        memcpy(&value, &bits, sizeof bits); \
        return value; \
    }
OFF(off, double, uint64_t, 0xffffff)
OFF(offf, float, uint32_t, 0x3ff)

#define FUNCTION(name, T, off, parameters, arguments) \
    T name parameters \
    { \
        static T (*real) parameters; \
        if (!real) \
            real = dlsym(RTLD_NEXT, #name); \
        T value = real arguments; \
        return is_numpy(__builtin_return_address(0)) ? off(value) : value; \
    }
#define ONE(name) FUNCTION(name, double, off, (double x), (x)) FUNCTION(name##f, float, offf, (float x), (x))
#define TWO(name) FUNCTION(name, double, off, (double x, double y), (x, y)) FUNCTION(name##f, float, offf, (float x, float y), (x, y))
ONE(exp) ONE(exp2) ONE(expm1) ONE(log) ONE(log2) ONE(log10) ONE(log1p) ONE(cbrt)
ONE(sin) ONE(cos) ONE(tan) ONE(asin) ONE(acos) ONE(atan) ONE(sinh) ONE(cosh) ONE(tanh) ONE(asinh) ONE(acosh) ONE(atanh)
TWO(pow) TWO(atan2) TWO(hypot)
