#include "pool.h"

#include <linux/futex.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>

namespace forebay {
namespace {

constexpr uint64_t FIELD = 20;
constexpr uint64_t MASK = (1u << FIELD) - 1;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

inline uint64_t next_of(uint64_t ticket) { return ticket & MASK; }
inline uint64_t tasks_of(uint64_t ticket) { return (ticket >> FIELD) & MASK; }

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

}  // namespace

Pool::Pool(int threads, int spin_us) : threads_(threads < 1 ? 1 : threads), spin_us_(spin_us) {
    for (int i = 1; i < threads_; i++) workers_.emplace_back([this] { worker(); });
}

Pool::~Pool() {
    stop_.store(true);
    wake_.fetch_add(1);
    futex_wake(wake_);
    for (auto& thread : workers_) thread.join();
}

void Pool::drain(uint64_t ticket) {
    while (next_of(ticket) < tasks_of(ticket)) {
        if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) {
            fn_(context_, static_cast<int64_t>(next_of(ticket)));
            completed_.fetch_add(1, std::memory_order_release);
            ticket = ticket_.load(std::memory_order_acquire);
        }
    }
}

void Pool::run(void (*fn)(void*, int64_t), void* context, int64_t tasks) {
    if (tasks <= 0) return;
    if (tasks == 1 || threads_ == 1) {
        for (int64_t i = 0; i < tasks; i++) fn(context, i);
        return;
    }
    std::lock_guard<std::mutex> lock(caller_);
    for (int64_t first = 0; first < tasks; first += static_cast<int64_t>(MASK)) {
        const int64_t left = tasks - first;
        const uint64_t count = left < static_cast<int64_t>(MASK) ? static_cast<uint64_t>(left) : MASK;
        struct Shifted {
            void (*fn)(void*, int64_t);
            void* context;
            int64_t first;
        } shifted{fn, context, first};
        if (first == 0) {
            fn_ = fn;
            context_ = context;
        } else {
            fn_ = [](void* c, int64_t i) {
                auto* s = static_cast<Shifted*>(c);
                s->fn(s->context, s->first + i);
            };
            context_ = &shifted;
        }
        completed_.store(0, std::memory_order_relaxed);
        const uint64_t epoch = (ticket_.load(std::memory_order_relaxed) >> (2 * FIELD)) + 1;
        const uint64_t ticket = (epoch << (2 * FIELD)) | (count << FIELD);
        ticket_.store(ticket, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst) != 0) {
            wake_.fetch_add(1, std::memory_order_seq_cst);
            futex_wake(wake_);
        }
        drain(ticket);
        for (int spins = 0; completed_.load(std::memory_order_acquire) != static_cast<int64_t>(count); spins++) {
            // A worker may have been descheduled while it runs a task: after some spins, yield the core to it.
            if (spins < 20000) pause();
            else std::this_thread::yield();
        }
    }
}

void Pool::worker() {
    prctl(PR_SET_NAME, "forebay-kernel", 0, 0, 0);
    using clock = std::chrono::steady_clock;
    while (!stop_.load(std::memory_order_relaxed)) {
        const auto deadline = clock::now() + std::chrono::microseconds(spin_us_);
        for (int spins = 0;; spins++) {
            const uint64_t ticket = ticket_.load(std::memory_order_acquire);
            if (next_of(ticket) < tasks_of(ticket)) {
                drain(ticket);
                break;
            }
            pause();
            if ((spins & 31) == 31 && clock::now() > deadline) {
                const uint32_t seen = wake_.load(std::memory_order_seq_cst);
                sleepers_.fetch_add(1, std::memory_order_seq_cst);
                const uint64_t again = ticket_.load(std::memory_order_seq_cst);
                if (next_of(again) >= tasks_of(again) && !stop_.load()) futex_wait(wake_, seen);
                sleepers_.fetch_sub(1, std::memory_order_seq_cst);
                break;
            }
        }
    }
}

}  // namespace forebay
