// A cache of table rows in memory, in front of a log-structured file. The Python side is tables/stores/row_cache.py.
//
// Every row has one entry in `places_`: 0 (never trained: a function of the seed), a slot (in memory), or a record
// (in the file). Rows leave memory by being appended to a segment of the log; segments are written whole. A row that is
// changed in memory makes its record dead; segments with few live records are compacted. Nothing outlives the process.
//
// One mutex guards everything but the rows themselves: those of a slot belong to the training thread while it is pinned,
// to an I/O thread while it is loading, and otherwise to whoever holds the mutex. Nobody holds it during I/O.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <atomic>
#include <deque>
#include <utility>

#include "row_forecast.h"
#include "row_reader.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace {

// ---- first values: the twin of recmill/rng.py ----

struct Shard {
    int64_t rows, first_row;
    uint64_t stream;
    float scale, bound;  // a value is 24 random bits * scale - bound
};

uint64_t random_bits(uint64_t key, uint64_t counter) {
    uint64_t z = counter * 0x9E3779B97F4A7C15u + key;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

void first_values(const Shard& shard, uint64_t row, int64_t dim, float* out) {
    const uint64_t first = (shard.first_row + row) * dim;
    uint64_t pair = first / 2, bits = random_bits(shard.stream, pair);
    for (int64_t c = 0; c < dim; ++c) {
        const uint64_t i = first + c;
        if (i / 2 != pair) bits = random_bits(shard.stream, pair = i / 2);
        const uint32_t half = i % 2 ? uint32_t(bits >> 32) : uint32_t(bits);
        out[c] = float(half >> 8) * shard.scale - shard.bound;
    }
}

// ---- CRC-32C ----

uint32_t crc_by_table(uint32_t crc, const uint8_t* data, size_t size) {
    static const std::vector<uint32_t> table = [] {
        std::vector<uint32_t> t(256);
        for (uint32_t i = 0; i < 256; ++i) {
            uint32_t c = i;
            for (int k = 0; k < 8; ++k) c = (c >> 1) ^ (c & 1 ? 0x82F63B78u : 0);
            t[i] = c;
        }
        return t;
    }();
    for (size_t i = 0; i < size; ++i) crc = (crc >> 8) ^ table[(crc ^ data[i]) & 255];
    return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t crc_by_instruction(uint32_t crc, const uint8_t* data, size_t size) {
    uint64_t c = crc;
    for (; size >= 8; size -= 8, data += 8) {
        uint64_t word;
        std::memcpy(&word, data, 8);
        c = _mm_crc32_u64(c, word);
    }
    for (; size; --size, ++data) c = _mm_crc32_u8(uint32_t(c), *data);
    return uint32_t(c);
}
#endif

uint32_t crc32c(uint32_t seed, const uint8_t* data, size_t size) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("sse4.2")) return ~crc_by_instruction(~seed, data, size);
#endif
    return ~crc_by_table(~seed, data, size);
}

// ---- failures that a test asks for ----

enum Point { kRead, kAppend, kCompact, kSnapshot, kPoints };

struct Failure {
    int64_t point, hit;  // hit 0: every time
    int64_t action;      // > 0: an error number, kShort or kSlow; < 0: minus a signal; 0: hang
};

constexpr int kShort = 10001;  // only a part is read or written
constexpr int kSlow = 10002;   // 50 ms

// ---- the cache ----

struct Options {
    int64_t dim, state_columns, slots, num_shards;
    const Shard* shards;
    float *weights, *state;
    int64_t fd, is_direct, alignment, segment_bytes, depth, engine, threads;
    int64_t lookahead, disk_budget, seed, num_failures;
    const Failure* failures;
};

enum Problem { kNone, kBadKey, kTooFewSlots, kClosed, kReadError, kWriteError, kChecksum, kDiskBudget, kLogFull };

enum Flag : uint8_t {
    kLoading = 1,
    kDirty = 2,       // newer than any record
    kPending = 4,     // dirty when the snapshot was taken, and unchanged since
    kWaited = 8,      // pin waits for it
    kDirtyLater = 16,  // dirty as soon as it is loaded
    kWasRead = 32,    // read, or ...
    kWasFirst = 64,   // ... computed, and not yet counted by pin
};

struct Slot {
    uint32_t key;
    uint32_t record;  // 0: none; else the number of its record, plus 1
    uint32_t pin;     // the last pin that used it
    uint16_t generation;
    uint8_t uses, flags;
};

struct Segment {
    enum State : uint8_t { kFree, kFilling, kSealed, kOnDisk };
    uint32_t sequence = 0, count = 0, live = 0, reads = 0;
    uint32_t min_generation = 0, max_generation = 0;
    int8_t buffer = -1;
    State state = kFree;
    bool compacting = false, in_snapshot = false, has_blocks = false;
};

struct HintedBatch {
    int64_t batch;
    uint32_t list;  // rows to load: the number of the first node; 0: none
};

struct Node {  // of a list of rows
    uint32_t key, next;
};

constexpr uint32_t kSlotBit = 1u << 31;
constexpr uint32_t kSideBit = 1u << 31;  // of a ticket: the index of a row that `read` wants; else a slot
constexpr int64_t kHeader = 12;          // checksum, key, generation
constexpr int kBuffers = 2;
constexpr int kSpareSegments = 3;  // beyond what the share of live records allows
constexpr double kMinLive = 0.7;
constexpr int64_t kBlock = 256;    // keys handled while the mutex is held
constexpr int64_t kMaxPassed = 1024;  // slots that are compared to evict one, at most
constexpr int64_t kChunkBytes = 256 << 10;
constexpr int64_t kTraceEntries = 16;  // bytes of a segment for each

class Cache final : public Receiver {
  public:
    explicit Cache(const Options& options)
        : o_(options), shards_(options.shards, options.shards + options.num_shards),
          failures_(options.failures, options.failures + options.num_failures) {
        starts_.push_back(0);
        for (const Shard& shard : shards_) starts_.push_back(starts_.back() + shard.rows);
        rows_ = starts_.back();
        values_ = o_.dim + o_.state_columns;
        record_bytes_ = kHeader + 4 * values_;
        per_segment_ = o_.segment_bytes / record_bytes_;
        block_ = std::min(kBlock, per_segment_);
        chunk_records_ = std::max<int64_t>(1, std::min(kChunkBytes, o_.segment_bytes) / record_bytes_);
        chunk_bytes_ = rounded(chunk_records_ * record_bytes_ + 2 * o_.alignment);
        places_ = take<uint32_t>(rows_);
        needed_ = take<uint8_t>(rows_);
        seen_ = take<uint8_t>((rows_ + 7) / 8);
        slots_ = take<Slot>(o_.slots);
        hand_ = int64_t(random_bits(uint64_t(o_.seed), 0) % uint64_t(o_.slots));
        queue_ = take<uint32_t>(o_.slots);
        wanted_ = take<uint8_t>(o_.slots);
        nodes_ = take<Node>(o_.slots);
        for (auto& buffer : buffers_) buffer = take<uint8_t>(o_.segment_bytes);
        compaction_chunk_ = take<uint8_t>(chunk_bytes_);
        snapshot_chunk_ = take<uint8_t>(chunk_bytes_);
        trace_.start(take<uint32_t>(o_.segment_bytes / kTraceEntries), o_.segment_bytes / kTraceEntries, o_.slots);
        requests_.resize(o_.depth);
        const int64_t read_bytes = rounded(record_bytes_ + o_.alignment - 1);
        uint8_t* memory = take<uint8_t>(o_.depth * read_bytes);
        for (int64_t i = 0; i < o_.depth; ++i) {
            requests_[i].buffer = memory + i * read_bytes;
            idle_.push_back(&requests_[i]);
        }
        if (!memory_is_complete_) return;
        reader_ = start_reader(o_.engine, int(o_.fd), o_.depth, o_.threads, memory, size_t(o_.depth * read_bytes), this);
        if (!reader_) return;
        SignalsBlocked blocked;
        writer_ = std::thread([this] { write_and_compact(); });
        fetcher_ = std::thread([this] { fetch_hinted(); });
    }

    ~Cache() override {
        {
            Lock lock(mutex_);
            closing_ = true;
        }
        wake_all();
        if (writer_.joinable()) writer_.join();
        if (fetcher_.joinable()) fetcher_.join();
        reader_.reset();  // waits for requests in flight, which write to our memory
        for (auto& [memory, bytes] : mapped_) munmap(memory, bytes);
    }

    bool works() const { return bool(reader_); }
    int64_t engine_kind() const { return dynamic_cast<Uring*>(reader_.get()) ? kUring : kThreads; }
    int64_t memory_bytes() const { return memory_bytes_; }

    Problem pin(const int64_t* keys, int64_t count, int64_t* out, int64_t batch, bool for_update) {
        std::lock_guard<std::mutex> one_at_a_time(pin_mutex_);
        is_pinning_ = true;
        Lock lock(mutex_);
        ++pins_;
        if (batch >= 0) current_ = batch;
        Problem problem = kNone;
        for (int64_t i = 0, room = 0; i < count && !problem; ++i) {
            if (room-- == 0) {
                const double start = seconds();
                problem = ensure_room(lock, block_);
                wait_seconds_ += seconds() - start;
                if (problem) break;
                room = block_ - 1;
            }
            if (i + 16 < count && uint64_t(keys[i + 16]) < uint64_t(rows_)) __builtin_prefetch(&places_[keys[i + 16]]);
            if (i + 8 < count && uint64_t(keys[i + 8]) < uint64_t(rows_)) {
                const int64_t soon = find(uint32_t(keys[i + 8]));
                soon >= 0 ? __builtin_prefetch(&slots_[soon], 1) : __builtin_prefetch(&needed_[keys[i + 8]], 1);
                if (soon >= 0 && wanted_rows_) __builtin_prefetch(&wanted_[soon], 1);
            }
            if (uint64_t(keys[i]) >= uint64_t(rows_)) {
                problem = detail(kBadKey, keys[i], rows_);
                break;
            }
            const uint32_t key = uint32_t(keys[i]);
            int64_t slot = find(key);
            while (slot < 0 && (slot = admit(key, true)) < 0) {
                if (slot == kFull) {
                    problem = detail(kTooFewSlots, count, o_.slots);
                    break;
                }
                wake_reader();
                const double start = seconds();
                wait_for_a_load(lock);
                problem = ensure_room(lock, block_);
                wait_seconds_ += seconds() - start;
                if (problem) break;
                room = block_ - 1;
                slot = find(key);
            }
            if (problem) break;
            out[i] = slot;
            if (slots_[slot].pin != pins_) use(slot, batch, for_update);
        }
        wake_reader();
        lookups_ += count;
        trace_.end_batch();
        if (batch >= 0) forget_hints(batch);
        if (pins_ % kHalveEvery == 0)
            for (int64_t s = 0; s < next_free_; ++s) slots_[s].uses /= 2;
        const double start = seconds();
        loaded_.wait(lock, [this] { return waiting_ == 0 || problem_; });
        wait_seconds_ += seconds() - start;
        is_pinning_ = false;
        fetch_.notify_one();
        return problem ? problem : problem_;
    }

    void unpin() {
        {
            Lock lock(mutex_);
            released_ = pins_;
        }
        fetch_.notify_one();
        loaded_.notify_all();
    }

    Problem read(const int64_t* keys, int64_t count, float* out) {
        std::lock_guard<std::mutex> one_at_a_time(read_mutex_);
        Lock lock(mutex_);
        std::vector<std::pair<uint32_t, uint32_t>> misses;  // key, position
        for (int64_t i = 0; i < count; ++i) {
            if (uint64_t(keys[i]) >= uint64_t(rows_)) return detail(kBadKey, keys[i], rows_);
            const uint32_t key = uint32_t(keys[i]), place = places_[key];
            if (place == 0) {
                fill_first(key, out + i * o_.dim);
            } else if (const int64_t slot = find(key); slot >= 0 && !(slots_[slot].flags & kLoading)) {
                std::memcpy(out + i * o_.dim, weights(slot), 4 * o_.dim);
            } else {
                misses.emplace_back(key, uint32_t(i));
            }
        }
        std::sort(misses.begin(), misses.end());
        for (const auto& miss : misses)
            if (side_.empty() || side_.back().first != miss.first) side_.push_back(miss);
        side_out_ = out;
        side_next_ = 0;
        side_left_ = int64_t(side_.size());
        wake_reader();
        loaded_.wait(lock, [this] { return side_left_ == 0 || problem_; });
        const Problem problem = problem_;
        if (problem) loaded_.wait(lock, [this] { return int64_t(idle_.size()) == o_.depth; });  // they write to `out`
        side_.clear();
        side_next_ = 0;
        lock.unlock();
        for (size_t i = 1; i < misses.size() && !problem; ++i)
            if (misses[i].first == misses[i - 1].first)
                std::memcpy(out + misses[i].second * o_.dim, out + misses[i - 1].second * o_.dim, 4 * o_.dim);
        return problem;
    }

    int64_t hint(int64_t batch, const int64_t* keys, int64_t count) {
        Lock lock(mutex_);
        if (problem_ || closing_) return 0;
        if (o_.slots >= rows_) return 1;  // nothing is evicted or read
        is_hinted_ = true;
        if (hints_.empty()) {
            if (wanted_rows_) clear_needs();  // rows of batches that never came
            if (current_ < batch - 1 || current_ >= batch) current_ = batch - 1;
        }
        if (batch - current_ > horizon()) return 0;
        if (!hints_.empty() && (wanted_rows_ + last_new_ > 2 * o_.slots || used_nodes_ + last_new_ > o_.slots)) return 0;
        const uint8_t mark = mark_of(batch);
        const int64_t before = wanted_rows_;
        hints_.push_back({batch, 0});
        for (int64_t i = 0; i < count; ++i) {
            if (uint64_t(keys[i]) >= uint64_t(rows_)) continue;  // pin reports it
            if (i + 16 < count && uint64_t(keys[i + 16]) < uint64_t(rows_)) __builtin_prefetch(&places_[keys[i + 16]]);
            if (i + 8 < count && uint64_t(keys[i + 8]) < uint64_t(rows_)) {
                const int64_t soon = find(uint32_t(keys[i + 8]));
                __builtin_prefetch(soon >= 0 ? &wanted_[soon] : &needed_[keys[i + 8]], 1);
            }
            const uint32_t key = uint32_t(keys[i]);
            const int64_t slot = find(key);
            uint8_t& needed = slot >= 0 ? wanted_[slot] : needed_[key];
            if (needed == 0) {
                ++wanted_rows_;
                if (slot < 0) list(key, hints_.back());
            }
            needed = mark;
        }
        last_new_ = wanted_rows_ - before;
        fetch_.notify_one();
        return 1;
    }

    void drop_hints() {
        Lock lock(mutex_);
        clear_needs();
    }

    Problem snapshot_begin(int64_t since) {
        Lock lock(mutex_);
        if (const int error = reach(kSnapshot)) fail(kReadError, error);
        snapshot_ = kFlushing;
        since_ = since;
        snapshot_generation_ = generation_++;
        std::memset(seen_, 0, (rows_ + 7) / 8);
        for (int64_t s = 0; s < next_free_; ++s)
            if (slots_[s].flags & kDirty) slots_[s].flags |= kPending;
        cursor_ = 0;
        return problem_;
    }

    // Returns the number of rows, 0 at the end, or minus a Problem. `room` is at least the records of a chunk.
    int64_t snapshot_next(int64_t room, int64_t* keys, float* weights_out, float* state_out) {
        Lock lock(mutex_);
        if (snapshot_ == kFlushing) {
            while (cursor_ < next_free_) {
                if (const Problem problem = ensure_room(lock, block_)) return -problem;
                for (const int64_t end = std::min(next_free_, cursor_ + block_); cursor_ < end; ++cursor_)
                    if (slots_[cursor_].flags & kPending) clean(slots_[cursor_], cursor_);
            }
            note_segments();
        }
        int64_t count = 0;
        while (!noted_.empty() && room - count >= chunk_records_) {
            auto& [number, left] = noted_.back();
            const int64_t first = std::max<int64_t>(0, left - chunk_records_);
            const uint8_t* records = read_chunk(lock, number, first, left, snapshot_chunk_);
            if (!records) return -problem_;
            for (int64_t i = left - 1; i >= first; --i) {  // the newest record of a row counts
                const uint8_t* record = records + (i - first) * record_bytes_;
                uint32_t key, generation;
                std::memcpy(&key, record + 4, 4);
                std::memcpy(&generation, record + 8, 4);
                const bool is_valid = key < rows_ && is_intact(record, segments_[number].sequence);
                if (!is_valid) return -fail(kChecksum, 0, int64_t(number) * o_.segment_bytes + i * record_bytes_);
                if (generation > snapshot_generation_ || generation < since_) continue;
                if (seen_[key / 8] >> (key % 8) & 1) continue;
                seen_[key / 8] |= uint8_t(1 << (key % 8));
                keys[count] = key;
                std::memcpy(weights_out + count * o_.dim, record + kHeader, 4 * o_.dim);
                if (o_.state_columns)
                    std::memcpy(state_out + count * o_.state_columns, record + kHeader + 4 * o_.dim, 4 * o_.state_columns);
                ++count;
            }
            left = first;
            if (left == 0) {
                segments_[number].in_snapshot = false;
                free_if_dead(number);
                noted_.pop_back();
            }
        }
        if (noted_.empty()) end_snapshot();
        return problem_ ? -problem_ : count;
    }

    void snapshot_end() {
        Lock lock(mutex_);
        end_snapshot();
    }

    Problem load(const int64_t* keys, int64_t count, const float* weights_in, const float* state_in) {
        Lock lock(mutex_);
        for (int64_t i = 0, room = 0; i < count; ++i) {
            if (room-- == 0) {
                if (const Problem problem = ensure_room(lock, block_)) return problem;
                room = block_ - 1;
            }
            if (uint64_t(keys[i]) >= uint64_t(rows_)) return detail(kBadKey, keys[i], rows_);
            const uint32_t key = uint32_t(keys[i]);
            const float *w = weights_in + i * o_.dim, *s = state_in + i * o_.state_columns;
            int64_t slot = find(key);
            while (slot >= 0 && (slots_[slot].flags & kLoading) && !problem_) {
                wait_for_a_load(lock);
                slot = find(key);  // it may have been evicted
            }
            if (slot < 0 && next_free_ < o_.slots) {
                slot = next_free_++;
                occupy(slot, {key, places_[key], 0, 0, 1, 0});
            }
            if (slot >= 0) {
                if (slots_[slot].flags & kPending) clean(slots_[slot], slot);
                std::memcpy(weights(slot), w, 4 * o_.dim);
                if (o_.state_columns) std::memcpy(state(slot), s, 4 * o_.state_columns);
                make_dirty(slots_[slot]);
            } else {
                const uint32_t old = places_[key];
                places_[key] = append(key, generation_, w, s) + 1;
                if (old) drop(old - 1);
                else ++trained_rows_;
            }
        }
        if (!pins_) loaded_rows_ = trained_rows_;
        return problem_;
    }

    int64_t advance() {
        Lock lock(mutex_);
        return ++generation_;
    }
    int64_t position() {
        Lock lock(mutex_);
        return generation_;
    }

    void counters(int64_t* out, double* wait) {
        Lock lock(mutex_);
        const int64_t values[] = {lookups_, used_rows_, misses_, first_touches_, bytes_read_, bytes_written_,
                                  blocks_ * o_.segment_bytes, live_ * record_bytes_, int64_t(hints_.size()),
                                  trained_rows_};
        std::copy(std::begin(values), std::end(values), out);
        *wait = wait_seconds_;
    }

    // Returns how many of the sampled rows a cache with `slots` would have read.
    int64_t forecast(int64_t slots) {
        Lock lock(mutex_);
        return trace_.reads(slots, is_hinted_ ? horizon() : 0, loaded_rows_);
    }

    void problem(int64_t* out) {
        Lock lock(mutex_);
        out[0] = last_problem_, out[1] = last_error_, out[2] = last_a_, out[3] = last_b_;
    }

    int take(Request** requests, int room, bool may_wait) override {
        Lock lock(mutex_);
        while (!closing_) {
            int count = 0;
            while (count < room && !idle_.empty() && !problem_)
                if (Request* request = next_request()) requests[count++] = request;
                else break;
            if (!waiting_ || watchers_) loaded_.notify_all();  // rows that were copied
            if (count || !may_wait) return count;
            ++resting_;
            work_.wait(lock);
            --resting_;
        }
        return kOver;
    }

    void done(Request** requests, int count) override {
        for (int i = 0; i < count; ++i) settle(*requests[i]);
        Lock lock(mutex_);
        for (int i = 0; i < count; ++i) {
            Request& request = *requests[i];
            --segments_[request.segment].reads;
            free_if_dead(request.segment);
            idle_.push_back(&request);
            if (request.result < 0) fail(kReadError, int(-request.result), request.offset);
            else if (request.result == 0) fail(kChecksum, 0, request.offset + request.skip);
            else if (request.ticket & kSideBit) --side_left_;
            else bytes_read_ += request.length, finish(request.ticket);
        }
        if ((!waiting_ && !side_left_) || watchers_ || problem_ || closing_) loaded_.notify_all();
    }

  private:
    static constexpr int64_t kFull = -1, kBusy = -2;
    enum SnapshotState { kNoSnapshot, kFlushing, kReading };

    int64_t rounded(int64_t bytes) const { return (bytes + o_.alignment - 1) / o_.alignment * o_.alignment; }

    template <class T>
    T* take(int64_t count) {  // zeros, aligned to pages
        const size_t bytes = std::max<size_t>(1, size_t(count) * sizeof(T));
        void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) {
            memory_is_complete_ = false;
            return nullptr;
        }
        madvise(memory, bytes, MADV_HUGEPAGE);  // a hint: fewer TLB misses in arrays that are accessed at random
        mapped_.emplace_back(memory, bytes);
        memory_bytes_ += int64_t(bytes);
        return static_cast<T*>(memory);
    }

    float* weights(int64_t slot) const { return o_.weights + slot * o_.dim; }
    float* state(int64_t slot) const { return o_.state + slot * o_.state_columns; }
    int64_t find(uint32_t key) const { return places_[key] & kSlotBit ? int64_t(places_[key] & ~kSlotBit) : -1; }
    static uint8_t mark_of(int64_t batch) { return uint8_t(1 + batch % 255); }
    int64_t distance_to(uint8_t mark) const {  // batches from the current one
        const int64_t distance = mark - mark_of(std::max<int64_t>(current_, 0));
        return distance < 0 ? distance + 255 : distance;
    }

    void fill_first(uint32_t key, float* out) const {
        const auto shard = std::upper_bound(starts_.begin(), starts_.end(), int64_t(key)) - starts_.begin() - 1;
        first_values(shards_[shard], uint64_t(key - starts_[shard]), o_.dim, out);
    }

    int reach(Point point) {
        const int64_t hit = ++hits_[point];
        for (const Failure& failure : failures_) {
            if (failure.point != point || (failure.hit && failure.hit != hit)) continue;
            if (failure.action == kSlow) {
                usleep(50000);
                continue;
            }
            if (failure.action > 0) return int(failure.action);
            if (failure.action < 0) raise(int(-failure.action));
            while (failure.action == 0) sleep(1000);
        }
        return 0;
    }

    Problem detail(Problem problem, int64_t a, int64_t b) {
        last_problem_ = problem, last_error_ = 0, last_a_ = a, last_b_ = b;
        return problem;
    }

    Problem fail(Problem problem, int error, int64_t a = 0, int64_t b = 0) {  // for good
        if (!problem_) {
            detail(problem, a, b);
            last_error_ = error;
            problem_ = problem;
        }
        wake_all();
        return problem_;
    }

    void wake_all() {
        loaded_.notify_all();
        room_.notify_all();
        write_.notify_all();
        fetch_.notify_all();
        work_.notify_all();
    }

    void wait_for_a_load(Lock& lock) {
        ++watchers_;
        loaded_.wait(lock);
        --watchers_;
    }

    // -- slots --

    void use(int64_t number, int64_t batch, bool for_update) {
        Slot& slot = slots_[number];
        slot.pin = pins_;
        if (slot.uses < 255) ++slot.uses;
        ++used_rows_;
        misses_ += (slot.flags & kWasRead) != 0;
        first_touches_ += (slot.flags & kWasFirst) != 0;
        trace_.add(slot.key, slot.flags & kWasFirst);
        slot.flags &= uint8_t(~(kWasRead | kWasFirst));
        if (wanted_rows_ && batch >= 0 && wanted_[number] == mark_of(batch)) wanted_[number] = 0, --wanted_rows_;
        if (slot.flags & kLoading) {
            slot.flags |= for_update ? kWaited | kDirtyLater : kWaited;
            ++waiting_;
        } else if (for_update) {
            if (slot.flags & kPending) clean(slot, number);
            make_dirty(slot);
        }
    }

    void make_dirty(Slot& slot) {
        slot.generation = uint16_t(generation_);
        if (slot.flags & kDirty) return;
        slot.flags |= kDirty;
        if (slot.record) drop(slot.record - 1);
        else ++trained_rows_;
        slot.record = 0;
    }

    void clean(Slot& slot, int64_t number) {
        // Dirty rows are never older than 65,535 generations: each snapshot cleans them.
        const uint32_t generation = generation_ - uint16_t(uint16_t(generation_) - slot.generation);
        slot.record = append(slot.key, generation, weights(number), state(number)) + 1;
        slot.flags &= uint8_t(~(kDirty | kPending));
    }

    void finish(uint32_t number) {
        Slot& slot = slots_[number];
        if (slot.flags & kWaited) --waiting_;
        const bool is_changed = slot.flags & kDirtyLater;
        slot.flags &= uint8_t(~(kLoading | kWaited | kDirtyLater));
        if (is_changed) make_dirty(slot);
    }

    // Gives the row a slot; its values are there at once, or when it is no longer loading. kBusy: after a load, perhaps.
    int64_t admit(uint32_t key, bool is_urgent) {
        const int64_t number = take_slot(is_urgent);
        if (number < 0) return number;
        const uint32_t record = places_[key];
        const uint8_t flags = record ? kWasRead | kLoading : kWasFirst;
        occupy(number, {key, record, 0, 0, 0, flags});
        if (record) {
            const int64_t size = o_.slots;
            if (is_urgent) queue_head_ = (queue_head_ + size - 1) % size;
            queue_[is_urgent ? queue_head_ : (queue_head_ + queued_) % size] = uint32_t(number);
            ++queued_;
        } else {
            fill_first(key, weights(number));
            if (o_.state_columns) std::memset(state(number), 0, 4 * o_.state_columns);
        }
        return number;
    }

    bool may_leave(const Slot& slot) const { return slot.pin <= released_ && !(slot.flags & kLoading); }

    // A hand goes round the slots and takes the first whose worth reaches a bar. The bar rises and falls so that this is
    // one of about kPassed.
    int64_t take_slot(bool is_urgent) {
        if (next_free_ < o_.slots) return next_free_++;
        for (int64_t passed = 1; passed <= kMaxPassed; ++passed) {
            const int64_t worth = worth_evicting(next_slot());
            if (worth && worth >= bar_) {
                bar_ += passed < kPassed ? bar_ / 64 + 1 : -bar_ / 64;
                return evict(hand_);
            }
            if (passed % kPassed == 0) bar_ -= (bar_ + 31) / 32;
        }
        if (!is_urgent) return kFull;
        bool is_loading = false;
        for (int64_t i = 0; i < o_.slots; ++i) {
            if (may_leave(slots_[next_slot()])) return evict(hand_);
            is_loading |= slots_[hand_].pin <= released_ && (slots_[hand_].flags & kLoading);
        }
        return is_loading ? kBusy : kFull;
    }

    int64_t horizon() const { return o_.lookahead ? std::min(o_.lookahead, kMaxHorizon) : kMaxHorizon; }

    int64_t next_slot() { return hand_ = hand_ + 1 < o_.slots ? hand_ + 1 : 0; }

    int64_t worth_evicting(int64_t number) const {
        const Slot& slot = slots_[number];
        if (!may_leave(slot)) return 0;
        const uint8_t wanted = wanted_[number];
        return ::worth_evicting(wanted, distance_to(wanted), slot.uses, slot.flags & (kWasRead | kWasFirst));
    }

    int64_t evict(int64_t number) {
        Slot& slot = slots_[number];
        if (slot.flags & kDirty) clean(slot, number);
        places_[slot.key] = slot.record;
        needed_[slot.key] = wanted_[number];
        if (const int64_t batch = current_ + distance_to(wanted_[number]); wanted_[number] && !hints_.empty())
            if (batch >= hints_.front().batch && batch <= hints_.back().batch)
                list(slot.key, hints_[batch - hints_.front().batch]);
        return number;
    }

    void occupy(int64_t number, const Slot& slot) {
        slots_[number] = slot;
        places_[slot.key] = kSlotBit | uint32_t(number);
        wanted_[number] = std::exchange(needed_[slot.key], uint8_t(0));
    }

    // -- reads --

    void wake_reader() {
        if (const int64_t count = queued_ + int64_t(side_.size() - side_next_); count && resting_)
            count > 1 ? work_.notify_all() : work_.notify_one();
    }

    // Returns what to read next, or null. Rows that are in memory already are copied on the way.
    Request* next_request() {
        while (true) {
            uint32_t ticket, key, record;
            if (side_next_ < side_.size()) {
                key = side_[side_next_].first;
                ticket = kSideBit | uint32_t(side_next_++);
                const int64_t slot = find(key);
                if (slot >= 0 && !(slots_[slot].flags & kLoading)) {  // it was loaded meanwhile
                    std::memcpy(side_row(ticket), weights(slot), 4 * o_.dim);
                    finish_side();
                    continue;
                }
                record = (slot >= 0 ? slots_[slot].record : places_[key]) - 1;
            } else if (queued_) {
                ticket = queue_[queue_head_];
                queue_head_ = (queue_head_ + 1) % o_.slots;
                --queued_;
                key = slots_[ticket].key;
                record = slots_[ticket].record - 1;
            } else {
                return nullptr;
            }
            const uint32_t number = uint32_t(record / per_segment_);
            Segment& segment = segments_[number];
            const int64_t begin = record % per_segment_ * record_bytes_;
            if (segment.buffer >= 0) {  // not written yet
                copy_out(buffers_[segment.buffer] + begin, ticket);
                if (ticket & kSideBit) finish_side();
                else finish(ticket);
                continue;
            }
            Request* request = idle_.back();
            idle_.pop_back();
            ++segment.reads;
            const int64_t at = int64_t(number) * o_.segment_bytes + begin;
            request->offset = at / o_.alignment * o_.alignment;
            request->skip = uint32_t(at - request->offset);
            request->length = uint32_t(rounded(request->skip + record_bytes_));
            request->ticket = ticket, request->key = key, request->segment = number;
            request->sequence = segment.sequence;
            return request;
        }
    }

    float* side_row(uint32_t ticket) const { return side_out_ + int64_t(side_[ticket & ~kSideBit].second) * o_.dim; }

    void finish_side() {
        if (--side_left_ == 0) loaded_.notify_all();
    }

    void copy_out(const uint8_t* record, uint32_t ticket) const {
        const bool is_side = ticket & kSideBit;
        std::memcpy(is_side ? side_row(ticket) : weights(ticket), record + kHeader, 4 * o_.dim);
        if (!is_side && o_.state_columns)
            std::memcpy(state(ticket), record + kHeader + 4 * o_.dim, 4 * o_.state_columns);
    }

    // Checks what was read and copies it to its row. Leaves a positive result, 0 (wrong checksum) or minus an error.
    void settle(Request& request) {
        if (const int error = reach(kRead); error == kShort) request.result = request.result / 2 / o_.alignment * o_.alignment;
        else if (error) request.result = -error;
        if (request.result == -EINTR || request.result == -EAGAIN) request.result = 0;
        if (request.result >= 0)
            request.result = read_fully(int(o_.fd), request.buffer, request.length, request.offset, request.result);
        if (request.result < 0) return;
        if (!o_.is_direct) posix_fadvise(int(o_.fd), request.offset, request.length, POSIX_FADV_DONTNEED);
        const uint8_t* record = request.buffer + request.skip;
        uint32_t key;
        std::memcpy(&key, record + 4, 4);
        if (request.result < request.length || key != request.key || !is_intact(record, request.sequence)) {
            request.result = 0;
            return;
        }
        copy_out(record, request.ticket);
    }

    bool is_intact(const uint8_t* record, uint32_t sequence) const {
        uint32_t crc;
        std::memcpy(&crc, record, 4);
        return crc == crc32c(sequence, record + 4, size_t(record_bytes_ - 4));
    }

    // -- the log. The mutex is held; only `ensure_room`, `read_chunk` and `write_oldest` release it. --

    uint32_t append(uint32_t key, uint32_t generation, const float* w, const float* s) {
        if (filling_ < 0) open_segment();
        Segment& segment = segments_[filling_];
        uint8_t* record = buffers_[segment.buffer] + segment.count * record_bytes_;
        std::memcpy(record + 4, &key, 4);
        std::memcpy(record + 8, &generation, 4);
        std::memcpy(record + kHeader, w, 4 * o_.dim);
        if (o_.state_columns) std::memcpy(record + kHeader + 4 * o_.dim, s, 4 * o_.state_columns);
        const uint32_t crc = crc32c(segment.sequence, record + 4, size_t(record_bytes_ - 4));
        std::memcpy(record, &crc, 4);
        segment.min_generation = segment.count ? std::min(segment.min_generation, generation) : generation;
        segment.max_generation = segment.count ? std::max(segment.max_generation, generation) : generation;
        const uint32_t number = uint32_t(filling_ * per_segment_ + segment.count);
        ++segment.count, ++segment.live, ++live_;
        if (segment.count == per_segment_) {
            segment.state = Segment::kSealed;
            sealed_.push_back(uint32_t(filling_));
            filling_ = -1;
            write_.notify_one();
        }
        return number;
    }

    void open_segment() {
        auto& source = !reusable_.empty() ? reusable_ : punched_;
        if (!source.empty()) {
            filling_ = source.back();
            source.pop_back();
        } else {
            filling_ = int64_t(segments_.size());
            segments_.emplace_back();
            if ((filling_ + 1) * per_segment_ >= int64_t(kSlotBit) - 1) fail(kLogFull, 0, rows_);
        }
        Segment& segment = segments_[filling_];
        const bool has_blocks = segment.has_blocks;
        segment = Segment();
        segment.has_blocks = true;
        segment.sequence = ++sequence_;
        segment.state = Segment::kFilling;
        segment.buffer = int8_t(free_buffers_.back());
        free_buffers_.pop_back();
        ++used_segments_;
        blocks_ += !has_blocks;
        if (o_.disk_budget && blocks_ * o_.segment_bytes > o_.disk_budget)
            fail(kDiskBudget, 0, blocks_ * o_.segment_bytes, o_.disk_budget);
    }

    void drop(uint32_t record) {
        const uint32_t number = uint32_t(record / per_segment_);
        --segments_[number].live, --live_;
        free_if_dead(number);
    }

    void free_if_dead(uint32_t number) {
        Segment& segment = segments_[number];
        const bool is_held = segment.compacting || segment.in_snapshot || snapshot_ == kFlushing || segment.reads;
        if (segment.live || segment.state != Segment::kOnDisk || is_held) return;
        segment.state = Segment::kFree;
        --used_segments_;
        reusable_.push_back(number);
        if (reusable_.size() > 2) write_.notify_one();
    }

    int64_t allowed_segments() const { return int64_t(double(live_) / kMinLive / double(per_segment_)) + 1 + kSpareSegments; }

    int64_t segment_to_compact() const {
        int64_t best = -1;
        if (used_segments_ <= allowed_segments() || snapshot_ == kFlushing) return best;
        for (size_t i = 0; i < segments_.size(); ++i) {
            const Segment& segment = segments_[i];
            if (segment.state != Segment::kOnDisk || segment.in_snapshot || segment.compacting) continue;
            if (!segment.live) continue;  // it is freed when the last read of it ends
            if (segment.live < per_segment_ && (best < 0 || segment.live < segments_[best].live)) best = int64_t(i);
        }
        return best;
    }

    int64_t room() const {
        const int64_t open = filling_ >= 0 ? per_segment_ - segments_[filling_].count : 0;
        return open + per_segment_ * int64_t(free_buffers_.size());
    }

    // Waits until `count` <= per_segment_ records can be appended.
    Problem ensure_room(Lock& lock, int64_t count, bool is_writer = false) {
        while (!problem_ && !closing_) {
            // A log that is too long grows by less than compaction frees.
            const bool is_limited = !is_writer && used_segments_ > allowed_segments() + kSpareSegments &&
                                    (is_compacting_ || segment_to_compact() >= 0);
            if (room() >= count && (!is_limited || credit_ >= count)) {
                if (is_limited) credit_ -= count;
                return kNone;
            }
            if (is_writer) {
                write_oldest(lock);
                continue;
            }
            write_.notify_one();
            room_.wait(lock);
        }
        return problem_ ? problem_ : detail(kClosed, 0, 0);
    }

    void write_oldest(Lock& lock) {
        const uint32_t number = sealed_.front();
        sealed_.pop_front();
        const int buffer = segments_[number].buffer;
        const int64_t offset = int64_t(number) * o_.segment_bytes;
        lock.unlock();
        int error = 0;
        for (int64_t have = 0; have < o_.segment_bytes && !error;) {
            const int failure = reach(kAppend);
            const int64_t left = failure == kShort ? o_.alignment : o_.segment_bytes - have;
            ssize_t put = -1;
            if (failure && failure != kShort) errno = failure;
            else put = pwrite(int(o_.fd), buffers_[buffer] + have, size_t(left), offset + have);
            if (put >= 0) have += put;
            else if (errno != EINTR && errno != EAGAIN) error = errno;
        }
        rlimit limit;  // in the middle of a block, it makes direct writes invalid
        if (error == EINVAL && !getrlimit(RLIMIT_FSIZE, &limit) && uint64_t(offset + o_.segment_bytes) > limit.rlim_cur)
            error = EFBIG;
        if (!error && !o_.is_direct) {
            sync_file_range(int(o_.fd), offset, o_.segment_bytes,
                            SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
            posix_fadvise(int(o_.fd), offset, o_.segment_bytes, POSIX_FADV_DONTNEED);
        }
        lock.lock();
        if (error) {
            fail(kWriteError, error, offset);
            return;  // its rows stay in the buffer
        }
        bytes_written_ += o_.segment_bytes;
        segments_[number].state = Segment::kOnDisk;
        segments_[number].buffer = -1;
        free_buffers_.push_back(buffer);
        free_if_dead(number);
        room_.notify_all();
    }

    // Returns records first..end-1 of a segment that is not freed meanwhile, or null.
    const uint8_t* read_chunk(Lock& lock, uint32_t number, int64_t first, int64_t end, uint8_t* chunk) {
        const int64_t begin = first * record_bytes_, bytes = (end - first) * record_bytes_;
        if (const int buffer = segments_[number].buffer; buffer >= 0) {
            std::memcpy(chunk, buffers_[buffer] + begin, size_t(bytes));
            return chunk;
        }
        const int64_t at = int64_t(number) * o_.segment_bytes + begin;
        const int64_t offset = at / o_.alignment * o_.alignment;
        const int64_t length = rounded(at + bytes - offset);
        lock.unlock();
        const int64_t got = read_fully(int(o_.fd), chunk, length, offset);
        if (!o_.is_direct) posix_fadvise(int(o_.fd), offset, length, POSIX_FADV_DONTNEED);
        lock.lock();
        if (got == length) return chunk + (at - offset);
        got < 0 ? fail(kReadError, int(-got), offset) : fail(kChecksum, 0, offset);
        return nullptr;
    }

    void write_and_compact() {
        Lock lock(mutex_);
        while (!closing_ && !problem_) {
            if (!sealed_.empty()) {
                write_oldest(lock);
            } else if (const int64_t number = segment_to_compact(); number >= 0) {
                compact(lock, uint32_t(number));
            } else if (reusable_.size() > 2) {
                punch(lock);
            } else {
                write_.wait(lock);
            }
        }
    }

    void compact(Lock& lock, uint32_t number) {
        if (const int error = reach(kCompact)) fail(kReadError, error);
        segments_[number].compacting = is_compacting_ = true;
        const int64_t count = segments_[number].count, freed = count - segments_[number].live;
        for (int64_t first = 0; first < count && segments_[number].live && !problem_; first += chunk_records_) {
            const int64_t end = std::min(count, first + chunk_records_);
            const uint8_t* records = read_chunk(lock, number, first, end, compaction_chunk_);
            for (int64_t i = first; records && i < end; ++i) {
                if ((i - first) % block_ == 0 && ensure_room(lock, block_, true)) break;
                const uint8_t* record = records + (i - first) * record_bytes_;
                const uint32_t place = uint32_t(number * per_segment_ + i) + 1;
                uint32_t key, generation;
                std::memcpy(&key, record + 4, 4);
                std::memcpy(&generation, record + 8, 4);
                const bool is_intact_record = key < rows_ && is_intact(record, segments_[number].sequence);
                if (!is_intact_record) {
                    fail(kChecksum, 0, int64_t(number) * o_.segment_bytes + i * record_bytes_);
                    break;
                }
                const int64_t slot = find(key);
                uint32_t& home = slot >= 0 ? slots_[slot].record : places_[key];
                if (home != place) continue;  // dead
                row_.resize(size_t(values_));
                std::memcpy(row_.data(), record + kHeader, size_t(4 * values_));
                home = append(key, generation, row_.data(), row_.data() + o_.dim) + 1;
                drop(place - 1);
            }
        }
        segments_[number].compacting = is_compacting_ = false;
        credit_ = std::min(4 * per_segment_, credit_ + std::max<int64_t>(block_, freed * 3 / 4));
        free_if_dead(number);
        room_.notify_all();
    }

    void punch(Lock& lock) {
        const uint32_t number = reusable_.front();
        reusable_.pop_front();
        lock.unlock();
        const int mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
        const bool is_punched = !fallocate(int(o_.fd), mode, int64_t(number) * o_.segment_bytes, o_.segment_bytes);
        lock.lock();
        if (is_punched) segments_[number].has_blocks = false, --blocks_;
        punched_.push_back(number);
    }

    // -- hints --

    void fetch_hinted() {
        Lock lock(mutex_);
        while (!closing_ && !problem_) {
            if (is_pinning_ || !next_to_fetch()) {  // pin goes first
                fetch_.wait(lock);
                continue;
            }
            if (ensure_room(lock, block_)) continue;
            HintedBatch* hinted = next_to_fetch();  // again: the mutex may have been released
            bool is_full = false;
            for (int64_t i = 0; hinted && hinted->list && i < block_ && !is_full; ++i) {
                const uint32_t key = unlist(*hinted);
                is_full = find(key) < 0 && admit(key, false) < 0;
                if (is_full) list(key, *hinted);
            }
            wake_reader();
            if (is_full) {
                fetch_.wait(lock);
            } else {  // the reader needs the mutex, too
                lock.unlock();
                std::this_thread::yield();
                lock.lock();
            }
        }
    }

    HintedBatch* next_to_fetch() {
        for (HintedBatch& hinted : hints_)
            if (hinted.batch <= current_ + kFetchAhead && hinted.list) return &hinted;
        return nullptr;
    }

    void forget_hints(int64_t batch) {
        for (; !hints_.empty() && hints_.front().batch <= batch; hints_.pop_front())
            while (hints_.front().list)
                if (uint8_t& needed = needed_[unlist(hints_.front())]; needed == mark_of(hints_.front().batch))
                    needed = 0, --wanted_rows_;
    }

    void list(uint32_t key, HintedBatch& hinted) {  // without a node, pin will load the row
        if (!free_node_ && used_nodes_ == o_.slots - 1) return;
        const uint32_t node = free_node_ ? free_node_ : uint32_t(used_nodes_ + 1);
        if (free_node_) free_node_ = nodes_[node].next;
        ++used_nodes_;
        nodes_[node] = {key, hinted.list};
        hinted.list = node;
    }

    uint32_t unlist(HintedBatch& hinted) {
        const uint32_t node = std::exchange(hinted.list, nodes_[hinted.list].next);
        nodes_[node].next = std::exchange(free_node_, node);
        --used_nodes_;
        return nodes_[node].key;
    }

    void clear_needs() {
        hints_.clear();
        std::memset(needed_, 0, size_t(rows_));
        std::memset(wanted_, 0, size_t(o_.slots));
        wanted_rows_ = used_nodes_ = last_new_ = 0;
        free_node_ = 0;
    }

    // -- snapshots --

    void note_segments() {
        snapshot_ = kReading;
        std::vector<uint32_t> numbers;
        for (uint32_t i = 0; i < segments_.size(); ++i) {
            const Segment& segment = segments_[i];
            const bool is_in = segment.min_generation <= snapshot_generation_ && segment.max_generation >= since_;
            if (segment.state != Segment::kFree && segment.count && is_in) numbers.push_back(i);
        }
        std::sort(numbers.begin(), numbers.end(),
                  [this](uint32_t a, uint32_t b) { return segments_[a].sequence < segments_[b].sequence; });
        for (const uint32_t number : numbers) {
            segments_[number].in_snapshot = true;
            noted_.emplace_back(number, segments_[number].count);
        }
        free_dead_segments();
    }

    void end_snapshot() {
        if (snapshot_ == kFlushing)
            for (int64_t s = 0; s < next_free_; ++s) slots_[s].flags &= uint8_t(~kPending);
        snapshot_ = kNoSnapshot;
        for (const auto& [number, left] : noted_) segments_[number].in_snapshot = false;
        noted_.clear();
        free_dead_segments();
    }

    void free_dead_segments() {
        for (uint32_t i = 0; i < segments_.size(); ++i) free_if_dead(i);
        write_.notify_one();
    }

    const Options o_;
    const std::vector<Shard> shards_;
    const std::vector<Failure> failures_;
    std::atomic<int64_t> hits_[kPoints] = {};
    std::vector<int64_t> starts_;
    int64_t rows_ = 0, values_ = 0, record_bytes_ = 0, per_segment_ = 0, block_ = 0, chunk_records_ = 0, chunk_bytes_ = 0;
    std::vector<std::pair<void*, size_t>> mapped_;
    int64_t memory_bytes_ = 0;
    bool memory_is_complete_ = true;

    std::mutex pin_mutex_, read_mutex_, mutex_;
    std::atomic<bool> is_pinning_{false};
    std::condition_variable loaded_, room_, write_, fetch_, work_;
    bool closing_ = false, is_compacting_ = false;
    Problem problem_ = kNone;
    int64_t last_problem_ = 0, last_error_ = 0, last_a_ = 0, last_b_ = 0;

    uint32_t* places_ = nullptr;  // by key: 0, kSlotBit | slot, or record + 1
    uint8_t* needed_ = nullptr;   // by key that is not in memory: 0, or the mark of the last hinted batch that needs it
    uint8_t* wanted_ = nullptr;   // the same by slot
    uint8_t* seen_ = nullptr;     // by key, one bit: it is in the snapshot
    Slot* slots_ = nullptr;
    int64_t next_free_ = 0, hand_ = 0, bar_ = 1 << 16;
    uint32_t pins_ = 0, released_ = 0;
    int64_t waiting_ = 0, watchers_ = 0, resting_ = 0;

    uint32_t* queue_ = nullptr;  // slots to load: a ring
    int64_t queue_head_ = 0, queued_ = 0;
    std::vector<Request> requests_;
    std::vector<Request*> idle_;
    std::vector<std::pair<uint32_t, uint32_t>> side_;  // key and position of what `read` wants
    size_t side_next_ = 0;
    int64_t side_left_ = 0;
    float* side_out_ = nullptr;

    std::vector<Segment> segments_;
    uint8_t* buffers_[kBuffers] = {};
    std::vector<int> free_buffers_ = {0, 1};
    std::deque<uint32_t> sealed_, reusable_;
    std::deque<uint32_t> punched_;
    uint8_t *compaction_chunk_ = nullptr, *snapshot_chunk_ = nullptr;
    std::vector<float> row_;
    int64_t filling_ = -1, used_segments_ = 0, blocks_ = 0, live_ = 0, credit_ = 0;
    uint32_t sequence_ = 0, generation_ = 0;

    std::deque<HintedBatch> hints_;
    Node* nodes_ = nullptr;  // number 0 is not used
    uint32_t free_node_ = 0;
    int64_t used_nodes_ = 0, wanted_rows_ = 0, last_new_ = 0, current_ = -1;

    SnapshotState snapshot_ = kNoSnapshot;
    int64_t since_ = 0, cursor_ = 0;
    uint32_t snapshot_generation_ = 0;
    std::vector<std::pair<uint32_t, int64_t>> noted_;  // segment and records not yet read, the newest last

    int64_t lookups_ = 0, used_rows_ = 0, misses_ = 0, first_touches_ = 0, bytes_read_ = 0, bytes_written_ = 0;
    int64_t trained_rows_ = 0, loaded_rows_ = 0;
    Trace trace_;
    bool is_hinted_ = false;
    double wait_seconds_ = 0;

    std::unique_ptr<Reader> reader_;
    std::thread writer_, fetcher_;
};

}  // namespace

extern "C" {

// Returns null if io_uring was asked for and is refused, or if memory is missing.
void* rows_open(const Options* options) {
    auto cache = std::make_unique<Cache>(*options);
    return cache->works() ? cache.release() : nullptr;
}
void rows_close(void* cache) { delete static_cast<Cache*>(cache); }
int64_t rows_engine(void* cache) { return static_cast<Cache*>(cache)->engine_kind(); }
int64_t rows_memory(void* cache) { return static_cast<Cache*>(cache)->memory_bytes(); }
int64_t rows_pin(void* cache, const int64_t* keys, int64_t count, int64_t* out, int64_t batch, int64_t for_update) {
    return static_cast<Cache*>(cache)->pin(keys, count, out, batch, for_update != 0);
}
void rows_unpin(void* cache) { static_cast<Cache*>(cache)->unpin(); }
int64_t rows_read(void* cache, const int64_t* keys, int64_t count, float* out) {
    return static_cast<Cache*>(cache)->read(keys, count, out);
}
int64_t rows_hint(void* cache, int64_t batch, const int64_t* keys, int64_t count) {
    return static_cast<Cache*>(cache)->hint(batch, keys, count);
}
void rows_drop_hints(void* cache) { static_cast<Cache*>(cache)->drop_hints(); }
int64_t rows_snapshot_begin(void* cache, int64_t since) { return static_cast<Cache*>(cache)->snapshot_begin(since); }
int64_t rows_snapshot_next(void* cache, int64_t room, int64_t* keys, float* weights, float* state) {
    return static_cast<Cache*>(cache)->snapshot_next(room, keys, weights, state);
}
void rows_snapshot_end(void* cache) { static_cast<Cache*>(cache)->snapshot_end(); }
int64_t rows_load(void* cache, const int64_t* keys, int64_t count, const float* weights, const float* state) {
    return static_cast<Cache*>(cache)->load(keys, count, weights, state);
}
int64_t rows_advance(void* cache) { return static_cast<Cache*>(cache)->advance(); }
int64_t rows_position(void* cache) { return static_cast<Cache*>(cache)->position(); }
void rows_counters(void* cache, int64_t* out, double* wait) { static_cast<Cache*>(cache)->counters(out, wait); }
int64_t rows_forecast(void* cache, int64_t slots) { return static_cast<Cache*>(cache)->forecast(slots); }
void rows_problem(void* cache, int64_t* out) { static_cast<Cache*>(cache)->problem(out); }

}  // extern "C"
