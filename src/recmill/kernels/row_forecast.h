// How many rows a cache of another size would have read: the latest uses of a sample of rows are kept, and a cache that
// is smaller by the same share is simulated with them. (Waldspurger et al., "Cache Modeling and Optimization using
// Miniature Simulations", USENIX ATC 2017.) The cache and its simulation evict by the same rule.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

constexpr int64_t kFetchAhead = 4;  // hinted batches whose rows are loaded; more are only protected
constexpr int64_t kMaxHorizon = 128;
constexpr int64_t kPassed = 32;      // slots that are compared to evict one, about
constexpr int64_t kHalveEvery = 64;  // batches

constexpr struct Shares {
    int64_t of[256];
    constexpr Shares() : of() {
        for (int64_t uses = 0; uses < 256; ++uses) of[uses] = 65535 / (uses + 1);
    }
} kShares;

// Rows that no hinted batch needs come first, the least used of them before the others; then those that are needed
// latest. The last batch that needs a row stands for the next one, which is not known; for rows that are used often it is
// too late, so it is divided by the uses. `distance`: batches until the last one that needs it. 0: not now.
inline int64_t worth_evicting(bool is_wanted, int64_t distance, uint8_t uses, bool is_unused) {
    if (!is_wanted || distance > kMaxHorizon) return (1 << 16) + kShares.of[uses];
    if (distance <= kFetchAhead || is_unused) return 0;
    return 1 + (distance * kShares.of[uses] >> 8);
}

class Trace {
  public:
    // Keeps the last `room` uses. They are enough uses for kTurns times as many rows as the cache has slots.
    void start(uint32_t* memory, int64_t room, int64_t slots) {
        memory_ = memory, room_ = room;
        share_ = std::min(1.0, double(room) / double(kTurns * slots));
        limit_ = uint32_t(share_ * 4294967295.0);
    }

    void add(uint32_t key, bool is_first_use) {
        if (key * 0x9E3779B1u <= limit_) put(key | (is_first_use ? kFirst : 0));
    }

    void end_batch() { put(kEnd); }

    // Returns the sampled rows that a cache with `slots` would have read. `horizon`: batches that hints may be ahead.
    // `loaded`: rows that were loaded before the first use.
    int64_t reads(int64_t slots, int64_t horizon, int64_t loaded) const;

  private:
    static constexpr int64_t kTurns = 32;
    static constexpr uint32_t kFirst = 1u << 31, kEnd = kFirst - 1;

    void put(uint32_t entry) {
        memory_[count_ % room_] = entry;
        ++count_;
    }

    friend class Simulation;
    uint32_t* memory_ = nullptr;
    int64_t room_ = 0, count_ = 0;
    double share_ = 1;
    uint32_t limit_ = 0;
};

// A cache that knows which rows it would hold. It loads them when they are used, not four batches earlier: these need few
// slots, unless a cache is hardly larger than a batch. Its memory is that of a snapshot's chunk, at most 2 segments.
class Simulation {
  public:
    Simulation(const Trace& trace, int64_t slots, int64_t horizon, int64_t loaded)
        : horizon_(horizon), slots_(std::max<int64_t>(1, int64_t(double(slots) * trace.share_ + 0.5))),
          was_cut_(trace.count_ > trace.room_), loaded_share_(double(slots) / double(std::max<int64_t>(1, loaded))) {
        const int64_t size = std::min(trace.count_, trace.room_);
        uses_.reserve(size_t(size));
        for (int64_t i = trace.count_ - size; i < trace.count_; ++i) uses_.push_back(trace.memory_[i % trace.room_]);
        std::vector<uint32_t> keys(uses_);
        for (uint32_t& key : keys) key &= Trace::kEnd;
        std::sort(keys.begin(), keys.end());
        keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
        for (uint32_t& use : uses_) {
            const uint32_t key = use & Trace::kEnd;
            if (key == Trace::kEnd) continue;
            use = (use & Trace::kFirst) | uint32_t(std::lower_bound(keys.begin(), keys.end(), key) - keys.begin());
        }
        rows_.resize(keys.size());
        in_slots_.reserve(size_t(std::min<int64_t>(slots_, int64_t(keys.size()))));
    }

    int64_t run() {
        const size_t size = uses_.size();
        counted_from_ = was_cut_ ? size / 2 : 0;  // by then, the cache has the rows that it would have
        size_t hinted = 0;
        for (size_t at = 0; at < size; ++batch_) {
            while (hinted < size && can_hint()) hinted = hint(hinted);
            for (; at < size && uses_[at] != Trace::kEnd; ++at) use(at);
            ++at;
            if (hinted < at) hinted = at, hinted_batches_ = batch_ + 1;
            if ((batch_ + 1) % kHalveEvery == 0)
                for (const uint32_t row : in_slots_) rows_[row].uses /= 2;
        }
        return reads_;
    }

  private:
    struct Row {
        int32_t needed = -1;  // the last hinted batch that needs it
        uint8_t uses = 0;
        bool is_cached = false, was_seen = false;
    };

    bool can_hint() const {
        const bool is_room = wanted_ + last_new_ <= 2 * slots_ && lacking_ + last_new_ <= slots_;
        return hinted_batches_ - batch_ < horizon_ && (is_room || hinted_batches_ <= batch_);
    }

    size_t hint(size_t at) {
        const int64_t before = wanted_;
        for (; at < uses_.size() && uses_[at] != Trace::kEnd; ++at) {
            Row& row = rows_[uses_[at] & Trace::kEnd];
            if (row.needed < 0) ++wanted_, lacking_ += !row.is_cached;
            row.needed = int32_t(hinted_batches_);
        }
        last_new_ = wanted_ - before;
        ++hinted_batches_;
        return at + 1;
    }

    void find(size_t at) {
        const uint32_t number = uses_[at] & Trace::kEnd;
        Row& row = rows_[number];
        if (row.is_cached) return;
        const bool was_loaded = !row.was_seen && !was_cut_ && random() < loaded_share_;
        if (at >= counted_from_ && (row.was_seen || !(uses_[at] & Trace::kFirst)) && !was_loaded) ++reads_;
        row.is_cached = row.was_seen = true;
        lacking_ -= row.needed >= 0;
        row.uses = 0;
        if (int64_t(in_slots_.size()) < slots_) in_slots_.push_back(number);
        else in_slots_[evict()] = number;
    }

    void use(size_t at) {
        find(at);
        Row& row = rows_[uses_[at] & Trace::kEnd];
        if (row.uses < 255) ++row.uses;
        if (row.needed == batch_) row.needed = -1, --wanted_;
    }

    size_t evict() {
        size_t best = 0;
        int64_t most = -1;
        for (int64_t i = 0; i < kPassed; ++i) {
            const size_t slot = size_t(random() * double(slots_));
            const Row& row = rows_[in_slots_[slot]];
            const int64_t worth = worth_evicting(row.needed >= 0, row.needed - batch_, row.uses, false);
            if (worth > most) best = slot, most = worth;
        }
        Row& row = rows_[in_slots_[best]];
        row.is_cached = false;
        lacking_ += row.needed >= 0;
        return best;
    }

    double random() {  // in [0, 1), always the same numbers
        random_ = random_ * 6364136223846793005u + 1442695040888963407u;
        return double(random_ >> 11) * 0x1p-53;
    }

    const int64_t horizon_, slots_;
    const bool was_cut_;
    const double loaded_share_;
    std::vector<uint32_t> uses_, in_slots_;
    std::vector<Row> rows_;
    int64_t batch_ = 0, hinted_batches_ = 0, wanted_ = 0, lacking_ = 0, last_new_ = 0, reads_ = 0;
    size_t counted_from_ = 0;
    uint64_t random_ = 1;
};

inline int64_t Trace::reads(int64_t slots, int64_t horizon, int64_t loaded) const {
    return Simulation(*this, slots, horizon, loaded).run();
}

}  // namespace
