// Measures random reads of a file with the threads that also read rows. The Python side is tables/stores/disk_probe.py.
#include "row_reader.h"

namespace {

// Reads blocks of a file at random places, `depth` at a time, until the time is over.
class DiskProbe : public Receiver {
  public:
    DiskProbe(int64_t blocks, int64_t block_bytes, int64_t depth, double until, uint8_t* memory)
        : blocks_(blocks), block_bytes_(block_bytes), until_(until), requests_(depth) {
        for (Request& request : requests_) {
            request.buffer = memory + int64_t(idle_.size()) * block_bytes;
            request.length = uint32_t(block_bytes);
            idle_.push_back(&request);
        }
    }

    int take(Request** requests, int room, bool) override {
        Lock lock(mutex_);
        if (error_ || seconds() >= until_) return kOver;
        int count = 0;
        for (; count < room && !idle_.empty(); ++count, idle_.pop_back()) {
            requests[count] = idle_.back();
            random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;
            requests[count]->offset = int64_t(random_ % uint64_t(blocks_)) * block_bytes_;
        }
        return count;
    }

    void done(Request** requests, int count) override {
        Lock lock(mutex_);
        count_ += count;
        for (int i = 0; i < count; ++i) {
            if (requests[i]->result < 0) error_ = -requests[i]->result;
            idle_.push_back(requests[i]);
        }
    }

    int64_t count() const { return error_ ? -error_ : count_; }  // or minus an error number

  private:
    const int64_t blocks_, block_bytes_;
    const double until_;
    std::vector<Request> requests_;
    std::vector<Request*> idle_;
    std::mutex mutex_;
    uint64_t random_ = 1;
    int64_t count_ = 0, error_ = 0;
};

}  // namespace

// Measures reads of a file of `blocks` blocks: out = elapsed and CPU seconds. Returns their number, minus an error
// number, or 0 if io_uring is refused. `memory` has room for `depth` blocks, aligned for direct reads.
extern "C" int64_t rows_probe(int64_t fd, int64_t blocks, int64_t block_bytes, int64_t depth, int64_t kind, double limit,
                              uint8_t* memory, double* out) {
    const double start = seconds(), cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
    DiskProbe probe(blocks, block_bytes, depth, start + limit, memory);
    auto reader = start_reader(kind, int(fd), depth, depth, memory, size_t(depth * block_bytes), &probe);
    const bool is_refused = !reader;
    reader.reset();  // waits until the time is over
    out[0] = seconds() - start;
    out[1] = seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu;
    return is_refused ? 0 : probe.count();
}
