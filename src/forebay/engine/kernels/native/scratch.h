// Per-thread scratch memory that only grows: kernels ask for it on every call and never free it.
#pragma once
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <new>

namespace FOREBAY_VARIANT {

class Scratch {
public:
    ~Scratch() { free(data_); }
    // 64-byte aligned, contents undefined.
    template <class T>
    T* get(int64_t count) {
        const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 4095) / 4096 * 4096;
        if (bytes > size_) {
            free(data_);
            data_ = aligned_alloc(4096, bytes);
            if (data_ == nullptr) throw std::bad_alloc();
            size_ = bytes;
        }
        return static_cast<T*>(data_);
    }

private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

// One per thread and Tag; memory that is in use at the same time needs different tags.
template <class Tag>
Scratch& scratch() {
    static thread_local Scratch s;
    return s;
}

}  // namespace FOREBAY_VARIANT
