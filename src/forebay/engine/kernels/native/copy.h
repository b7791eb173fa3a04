// Copies of many pieces of memory (runs) between a device pool and host pages.
//
// The bytes are not used again soon, so they are written with streaming stores, which bypass the caches, as memcpy does for
// one large block; a plain store first reads the line that it overwrites. Runs that are adjacent in both memories are copied
// as one. Other machines, unaligned addresses and short runs use memcpy.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define FB_STREAMING 1
#include <immintrin.h>
#endif

namespace forebay {

constexpr int64_t LINE = 64;
// Shorter runs are copied through the caches: streaming them saves less than the drain of the write buffers costs.
constexpr int64_t STREAMED_BYTES = 1024;

inline void copy_plain(char* to, const char* from, int64_t bytes, const char*) { memcpy(to, from, static_cast<size_t>(bytes)); }

#ifdef FB_STREAMING
// `to` is aligned to a line; `next`: what will be copied after this, prefetched meanwhile.
__attribute__((target("avx512f"))) inline void stream_avx512(char* to, const char* from, int64_t bytes, const char* next) {
    int64_t i = 0;
    for (; i + 4 * LINE <= bytes; i += 4 * LINE) {
        for (int64_t j = 0; j < 4 * LINE; j += LINE) _mm_prefetch(next + i + j, _MM_HINT_T0);
        const __m512i a = _mm512_loadu_si512(from + i), b = _mm512_loadu_si512(from + i + LINE);
        const __m512i c = _mm512_loadu_si512(from + i + 2 * LINE), d = _mm512_loadu_si512(from + i + 3 * LINE);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), a);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + LINE), b);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 2 * LINE), c);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 3 * LINE), d);
    }
    memcpy(to + i, from + i, static_cast<size_t>(bytes - i));
}

__attribute__((target("avx2"))) inline void stream_avx2(char* to, const char* from, int64_t bytes, const char* next) {
    int64_t i = 0;
    for (; i + 2 * LINE <= bytes; i += 2 * LINE) {
        _mm_prefetch(next + i, _MM_HINT_T0);
        _mm_prefetch(next + i + LINE, _MM_HINT_T0);
        const __m256i* source = reinterpret_cast<const __m256i*>(from + i);
        __m256i* target = reinterpret_cast<__m256i*>(to + i);
        const __m256i a = _mm256_loadu_si256(source), b = _mm256_loadu_si256(source + 1);
        const __m256i c = _mm256_loadu_si256(source + 2), d = _mm256_loadu_si256(source + 3);
        _mm256_stream_si256(target, a);
        _mm256_stream_si256(target + 1, b);
        _mm256_stream_si256(target + 2, c);
        _mm256_stream_si256(target + 3, d);
    }
    memcpy(to + i, from + i, static_cast<size_t>(bytes - i));
}
#endif

using CopyRun = void (*)(char*, const char*, int64_t, const char*);

#ifdef FB_STREAMING
constexpr CopyRun COPY_WAYS[] = {copy_plain, stream_avx2, stream_avx512};
#else
constexpr CopyRun COPY_WAYS[] = {copy_plain};
#endif

// The best of COPY_WAYS that this machine supports; it supports the ones before it as well.
inline int64_t best_copy_way() {
#ifdef FB_STREAMING
    if (__builtin_cpu_supports("avx512f")) return 2;
    if (__builtin_cpu_supports("avx2")) return 1;
#endif
    return 0;
}

// Makes streamed bytes visible to other threads before the copy is reported as done.
inline void copies_done() {
#ifdef FB_STREAMING
    _mm_sfence();
#endif
}

// For each i: `bytes` bytes from sources[i] to targets[i].
inline void copy_runs(int64_t way, const int64_t* targets, const int64_t* sources, int64_t count, int64_t bytes) {
    const CopyRun stream = COPY_WAYS[way];
    for (int64_t i = 0; i < count;) {
        int64_t stop = i + 1, length = bytes;
        for (; stop < count && targets[stop] == targets[i] + length && sources[stop] == sources[i] + length; stop++)
            length += bytes;
        char* to = reinterpret_cast<char*>(targets[i]);
        const char* from = reinterpret_cast<const char*>(sources[i]);
        const char* next = reinterpret_cast<const char*>(sources[stop < count ? stop : i]);
        const bool streams = length >= STREAMED_BYTES && targets[i] % LINE == 0;
        (streams ? stream : copy_plain)(to, from, length, next);
        i = stop;
    }
    copies_done();
}

}  // namespace forebay
