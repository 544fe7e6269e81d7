// Threads that read blocks of a file: one with io_uring, or many with pread. They ask a `Receiver` for requests.
#pragma once

#include <linux/io_uring.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace {

using Lock = std::unique_lock<std::mutex>;

struct Request {
    uint8_t* buffer;
    int64_t offset;
    uint32_t length, skip;  // what the receiver wants starts `skip` bytes after the offset
    uint32_t ticket, key, segment, sequence;
    int64_t result;  // bytes, or minus an error number
};

struct Receiver {
    // Returns up to `room` requests, or kOver at the end. Waits for the first if `may_wait`, else there may be none.
    virtual int take(Request** requests, int room, bool may_wait) = 0;
    virtual void done(Request** requests, int count) = 0;
    virtual ~Receiver() = default;
    static constexpr int kOver = -1;
};

// Reads what a short or interrupted read left; returns bytes or minus an error number.
int64_t read_fully(int fd, uint8_t* buffer, int64_t length, int64_t offset, int64_t have = 0) {
    while (have < length) {
        const ssize_t got = pread(fd, buffer + have, length - have, offset + have);
        if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (got < 0) return -errno;
        if (got == 0) break;
        have += got;
    }
    return have;
}

struct Reader {
    virtual ~Reader() = default;  // waits until the receiver says kOver
};

class Threads : public Reader {
  public:
    Threads(int fd, int count, Receiver* receiver) {
        for (int i = 0; i < count; ++i) threads_.emplace_back([=] { run(fd, receiver); });
    }
    ~Threads() override {
        for (auto& thread : threads_) thread.join();
    }

  private:
    static void run(int fd, Receiver* receiver) {
        Request* request;
        while (receiver->take(&request, 1, true) != Receiver::kOver) {
            request->result = read_fully(fd, request->buffer, request->length, request->offset);
            receiver->done(&request, 1);
        }
    }
    std::vector<std::thread> threads_;
};

// One thread submits and reaps, so that completions interrupt no other. All buffers are in `memory`.
class Uring : public Reader {
  public:
    Uring(int fd, unsigned depth, uint8_t* memory, size_t bytes, Receiver* receiver)
        : fd_(fd), depth_(depth), receiver_(receiver) {
        std::promise<bool> opened;
        auto works = opened.get_future();
        thread_ = std::thread([&, memory, bytes] {
            const bool is_open = open(memory, bytes);
            opened.set_value(is_open);
            if (is_open) run();
        });
        works_ = works.get();
    }
    ~Uring() override {
        thread_.join();
        if (entries_) munmap(entries_, entry_bytes_);
        if (rings_) munmap(rings_, ring_bytes_);
        if (ring_ >= 0) close(ring_);
    }
    bool works() const { return works_; }

  private:
    bool open(uint8_t* memory, size_t bytes) {
        io_uring_params params{};
        params.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;  // Linux 6.1
        ring_ = int(syscall(__NR_io_uring_setup, depth_, &params));
        if (ring_ < 0 && errno == EINVAL) {
            params = io_uring_params{};
            ring_ = int(syscall(__NR_io_uring_setup, depth_, &params));
        }
        const unsigned needed = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_RW_CUR_POS;  // Linux 5.6: IORING_OP_READ
        if (ring_ < 0 || (params.features & needed) != needed) return false;
        const size_t submissions = params.sq_off.array + params.sq_entries * sizeof(unsigned);
        const size_t completions = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
        ring_bytes_ = std::max(submissions, completions);
        entry_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
        rings_ = map(ring_bytes_, IORING_OFF_SQ_RING);
        entries_ = static_cast<io_uring_sqe*>(map(entry_bytes_, IORING_OFF_SQES));
        if (!rings_ || !entries_) return false;
        auto at = [this](unsigned offset) { return reinterpret_cast<unsigned*>(static_cast<char*>(rings_) + offset); };
        tail_ = at(params.sq_off.tail), mask_ = *at(params.sq_off.ring_mask), array_ = at(params.sq_off.array);
        done_head_ = at(params.cq_off.head), done_tail_ = at(params.cq_off.tail);
        done_mask_ = *at(params.cq_off.ring_mask);
        done_ = reinterpret_cast<io_uring_cqe*>(at(params.cq_off.cqes));
        // Both save the kernel work per read. Either may be refused, for example by the limit of locked memory.
        const iovec buffers{memory, bytes};
        has_buffers_ = syscall(__NR_io_uring_register, ring_, IORING_REGISTER_BUFFERS, &buffers, 1) == 0;
        has_file_ = syscall(__NR_io_uring_register, ring_, IORING_REGISTER_FILES, &fd_, 1) == 0;
        return true;
    }
    void* map(size_t bytes, off_t offset) {
        void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring_, offset);
        return memory == MAP_FAILED ? nullptr : memory;
    }
    void run() {
        std::vector<Request*> batch(depth_);
        unsigned in_flight = 0, unsubmitted = 0;
        while (true) {
            const int taken = receiver_->take(batch.data(), int(depth_ - in_flight), in_flight == 0);
            if (taken == Receiver::kOver && in_flight == 0) return;
            const unsigned count = unsigned(std::max(0, taken));
            for (unsigned i = 0; i < count; ++i) prepare(*batch[i], *tail_ + i);
            __atomic_store_n(tail_, *tail_ + count, __ATOMIC_RELEASE);
            in_flight += count, unsubmitted += count;
            // Several at a time, which takes less CPU time.
            const unsigned wanted = std::max(1u, std::min(32u, in_flight / 4));
            const long sent = syscall(__NR_io_uring_enter, ring_, unsubmitted, wanted, IORING_ENTER_GETEVENTS, nullptr, 0);
            if (sent > 0) unsubmitted -= unsigned(sent);
            if (sent < 0 && errno != EINTR) std::this_thread::yield();  // EAGAIN, EBUSY: the kernel is short of memory
            const unsigned reaped = reap(batch);
            in_flight -= reaped;
            if (reaped) receiver_->done(batch.data(), int(reaped));
        }
    }
    void prepare(const Request& request, unsigned position) {
        io_uring_sqe& entry = entries_[position & mask_];
        std::memset(&entry, 0, sizeof entry);
        entry.opcode = has_buffers_ ? IORING_OP_READ_FIXED : IORING_OP_READ;
        entry.flags = has_file_ ? IOSQE_FIXED_FILE : 0;
        entry.fd = has_file_ ? 0 : fd_;
        entry.addr = reinterpret_cast<uint64_t>(request.buffer);
        entry.len = request.length;
        entry.off = request.offset;
        entry.user_data = reinterpret_cast<uint64_t>(&request);
        array_[position & mask_] = position & mask_;
    }
    unsigned reap(std::vector<Request*>& batch) {
        unsigned head = *done_head_, count = 0;
        for (const unsigned tail = __atomic_load_n(done_tail_, __ATOMIC_ACQUIRE); head != tail; ++head) {
            const io_uring_cqe& entry = done_[head & done_mask_];
            batch[count] = reinterpret_cast<Request*>(entry.user_data);
            batch[count++]->result = entry.res;
        }
        __atomic_store_n(done_head_, head, __ATOMIC_RELEASE);
        return count;
    }

    const int fd_;
    const unsigned depth_;
    Receiver* const receiver_;
    bool works_ = false, has_buffers_ = false, has_file_ = false;
    int ring_ = -1;
    size_t ring_bytes_ = 0, entry_bytes_ = 0;
    void* rings_ = nullptr;
    io_uring_sqe* entries_ = nullptr;
    unsigned *tail_ = nullptr, *array_ = nullptr, *done_head_ = nullptr, *done_tail_ = nullptr;
    unsigned mask_ = 0, done_mask_ = 0;
    io_uring_cqe* done_ = nullptr;
    std::thread thread_;
};

enum ReaderKind { kAuto, kUring, kThreads };

// Keeps signals for the threads of Python while threads of ours are started.
struct SignalsBlocked {
    sigset_t before;
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_BLOCK, &all, &before);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
};

// Returns null if io_uring is asked for and refused. All requests' buffers are in `memory`.
std::unique_ptr<Reader> start_reader(int64_t kind, int fd, int64_t depth, int64_t threads, uint8_t* memory, size_t bytes,
                                     Receiver* receiver) {
    SignalsBlocked blocked;
    if (kind != kThreads) {
        auto ring = std::make_unique<Uring>(fd, unsigned(depth), memory, bytes, receiver);
        if (ring->works()) return ring;
        if (kind == kUring) return nullptr;
    }
    return std::make_unique<Threads>(fd, int(threads), receiver);
}

double seconds(clockid_t clock = CLOCK_MONOTONIC) {
    timespec now;
    clock_gettime(clock, &now);
    return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

}  // namespace
