// The functions that Python calls: supported instruction sets, engines (a variant and its threads), operations, and copies
// of pages.
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <memory>

#include "abi.h"
#include "copy.h"
#include "pool.h"

namespace forebay {
#define FB_DECLARE(name) extern const Variant variant_##name;
FB_DECLARE(amx)
FB_DECLARE(avx512_bf16)
FB_DECLARE(avx2)
FB_DECLARE(generic)

struct Engine {
    const Variant* variant;
    Pool pool;
    Engine(const Variant* v, int threads, int spin_us) : variant(v), pool(threads, spin_us) {}
};

namespace {

#ifdef FB_HAVE_AMX
bool tiles_granted() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

// AMX: cpuid leaf 7, edx bits 22 (bf16) and 24 (tiles); the compiler's builtin knows the rest.
bool has_amx() {
    uint32_t eax = 7, ebx = 0, ecx = 0, edx = 0;
    __asm__ volatile("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
    return (edx >> 22 & 1) != 0 && (edx >> 24 & 1) != 0;
}
#endif

#if defined(FB_HAVE_AVX512_BF16) || defined(FB_HAVE_AMX)
bool has_avx512_bf16() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16");
}
#endif

#ifdef FB_HAVE_AVX2
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#endif

// The index-th of the variants that this build contains and this machine supports, best first; null after the last.
const Variant* runnable(int index) {
    int count = 0;
    const Variant* found = nullptr;
    const auto offer = [&](bool can, const Variant* variant) {
        if (can && count++ == index) found = variant;
    };
#ifdef FB_HAVE_AMX
    offer(has_avx512_bf16() && has_amx() && tiles_granted(), &variant_amx);
#endif
#ifdef FB_HAVE_AVX512_BF16
    offer(has_avx512_bf16(), &variant_avx512_bf16);
#endif
#ifdef FB_HAVE_AVX2
    offer(has_avx2(), &variant_avx2);
#endif
    offer(true, &variant_generic);
    return found;
}

}  // namespace
}  // namespace forebay

using namespace forebay;

#pragma GCC visibility push(default)
extern "C" {

int64_t fb_abi_version() { return ABI_VERSION; }

// Name of the index-th best variant that this machine supports; null after the last.
const char* fb_variant(int64_t index) {
    const Variant* variant = runnable(static_cast<int>(index));
    return variant == nullptr ? nullptr : variant->name;
}

// An engine of the named variant; null when this machine does not support it. The caller counts as one of the threads.
void* fb_create(const char* name, int64_t threads, int64_t spin_us) {
    for (int i = 0;; i++) {
        const Variant* variant = runnable(i);
        if (variant == nullptr) return nullptr;
        if (strcmp(variant->name, name) == 0)
            return new Engine(variant, static_cast<int>(threads), static_cast<int>(spin_us));
    }
}

void fb_destroy(void* engine) { delete static_cast<Engine*>(engine); }

void fb_call(void* engine, int64_t op, const void* args) {
    Engine& e = *static_cast<Engine*>(engine);
    e.variant->ops[op](e.pool, args);
}

// A recorded run of operations: (op, bytes of args) headers of two int64, each followed by its args.
void fb_program(void* engine, const void* program, int64_t bytes) {
    Engine& e = *static_cast<Engine*>(engine);
    const char* at = static_cast<const char*>(program);
    const char* end = at + bytes;
    while (at < end) {
        int64_t head[2];
        memcpy(head, at, sizeof head);
        e.variant->ops[head[0]](e.pool, at + sizeof head);
        at += sizeof head + head[1];
    }
}

// The best copy function of this machine, for fb_copy_runs; smaller numbers are other functions.
int64_t fb_copy_way() { return best_copy_way(); }

// For each i: run_bytes bytes from sources[i] to targets[i].
void fb_copy_runs(int64_t way, const int64_t* targets, const int64_t* sources, int64_t count, int64_t run_bytes) {
    copy_runs(way, targets, sources, count, run_bytes);
}

}  // extern "C"
#pragma GCC visibility pop
