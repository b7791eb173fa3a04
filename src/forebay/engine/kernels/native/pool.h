// The threads. parallel(n, f) runs f(0) .. f(n - 1) on the caller and the workers; a free thread takes the next task.
// A worker that is asleep or descheduled never delays a job of which it has taken no task.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace forebay {

class Pool {
public:
    explicit Pool(int threads, int spin_us);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }

    template <class F>
    void parallel(int64_t tasks, const F& f) {
        run([](void* context, int64_t task) { (*static_cast<const F*>(context))(task); }, const_cast<F*>(&f), tasks);
    }

    // fn(context, task) for every task; returns when all are done.
    void run(void (*fn)(void*, int64_t), void* context, int64_t tasks);

private:
    void worker();
    void drain(uint64_t ticket);

    // The ticket is (epoch : 24 | tasks : 20 | next : 20). Claiming a task and reading the number of tasks is one
    // compare-and-swap, so a worker that is late by a whole job cannot take a task of the wrong one.
    std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int64_t> completed_{0};
    alignas(64) std::atomic<uint32_t> sleepers_{0};
    std::atomic<uint32_t> wake_{0};
    std::atomic<bool> stop_{false};
    void (*fn_)(void*, int64_t) = nullptr;
    void* context_ = nullptr;
    int threads_;
    int spin_us_;
    std::mutex caller_;
    std::vector<std::thread> workers_;
};

}  // namespace forebay
