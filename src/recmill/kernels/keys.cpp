// The ids of a dynamic table on one process: key -> row, how often it occurred, and when it was last trained.
// The Python side, which defines the rules, is tables/stores/key_table.py.
#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

struct Options {
    int64_t first_key, shared_rows, bits_per_shared_row, max_rows, max_entries;  // 2^bits keys use a shared row
    int64_t min_count, tosses_coin, expire_after;
    uint64_t coin_stream, coin_limit;  // of 2^53
};

enum Problem : int64_t { kTooManyRows = -1, kTooManyKeys = -2, kBadKey = -3 };

struct Entry {
    int64_t key;  // -1: empty
    int64_t last;  // the batch that last trained it
    uint32_t count;
    int32_t row;  // -1: none
};

// The twin of recmill/rng.py.
uint64_t random_bits(uint64_t key, uint64_t counter) {
    uint64_t z = counter * 0x9E3779B97F4A7C15u + key;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

class KeyTable {
  public:
    explicit KeyTable(const Options& options) : o_(options) { rebuild(1 << 10); }

    // Counts a batch of keys, which count from first_key, and writes the row of each. Returns the number of rows that
    // are new, with the keys that they belong to, or a Problem.
    int64_t train(const int64_t* ids, int64_t count, int64_t clock, int64_t* rows, int64_t* new_keys, int64_t* new_rows) {
        if (o_.expire_after && clock % o_.expire_after == 0) sweep(clock);
        reserve(count);
        for (int64_t i = 0; i < count; ++i) {
            if (i + 16 < count) __builtin_prefetch(&entries_[home(ids[i + 16] + o_.first_key)], 1);
            if (ids[i] < 0 || shared_row(ids[i]) >= o_.shared_rows) return kBadKey;
            rows[i] = meet(ids[i] + o_.first_key, clock);
            if (used_ > o_.max_entries) return kTooManyKeys;
        }
        int64_t admitted = 0;
        for (int64_t i = 0; i < count; ++i) {
            Entry* entry = rows[i] < 0 ? nullptr : &entries_[rows[i]];
            if (entry && entry->row < 0 && (o_.tosses_coin || entry->count >= o_.min_count)) {
                if ((entry->row = new_row(clock)) < 0) return kTooManyRows;
                new_keys[admitted] = entry->key;
                new_rows[admitted++] = entry->row;
            }
            rows[i] = entry && entry->row >= 0 ? entry->row : shared_row(ids[i]);
        }
        admitted_ += admitted;
        return admitted;
    }

    // Writes the row of each key at the time `clock`, without counting anything. Unknown keys have a shared row, or
    // -1 if `only_own`.
    int64_t find(const int64_t* ids, int64_t count, int64_t clock, bool only_own, int64_t* rows) const {
        for (int64_t i = 0; i < count; ++i) {
            if (i + 16 < count) __builtin_prefetch(&entries_[home(ids[i + 16] + o_.first_key)]);
            if (ids[i] < 0 || shared_row(ids[i]) >= o_.shared_rows) return kBadKey;
            const Entry& entry = entries_[position(ids[i] + o_.first_key)];
            const bool is_known = entry.key >= 0 && entry.row >= 0 && !is_expired(entry, clock);
            rows[i] = is_known ? entry.row : only_own ? -1 : shared_row(ids[i]);
        }
        return 0;
    }

    // Copies what is known at the time `clock`; returns its number. With null pointers, only counts.
    int64_t copy(int64_t clock, int64_t* keys, int64_t* lasts, int64_t* counts, int64_t* rows) const {
        int64_t n = 0;
        for (const Entry& entry : entries_) {
            if (entry.key < 0 || is_expired(entry, clock) || (o_.tosses_coin && entry.row < 0)) continue;
            if (keys) keys[n] = entry.key, lasts[n] = entry.last, counts[n] = entry.count, rows[n] = entry.row;
            ++n;
        }
        return n;
    }

    void clear() {
        used_ = next_row_ = 0;
        free_.clear();
        entries_.clear();
        rebuild(1 << 10);
    }

    // Adds keys, which are not in the table; those with has_row >= 0 get a row, written there.
    int64_t load(const int64_t* keys, const int64_t* lasts, const int64_t* counts, int64_t* has_row, int64_t count) {
        reserve(count);
        for (int64_t i = 0; i < count; ++i) {
            Entry& entry = entries_[position(keys[i])];
            if (entry.key >= 0) return kBadKey;
            if (++used_ > o_.max_entries) return kTooManyKeys;
            entry = {keys[i], lasts[i], uint32_t(counts[i]), -1};
            if (has_row[i] < 0) continue;
            if ((has_row[i] = entry.row = new_row(0)) < 0) return kTooManyRows;
        }
        return 0;
    }

    void facts(int64_t* out) const {
        const int64_t own = next_row_ - int64_t(free_.size());
        const int64_t bytes = int64_t(entries_.capacity() * sizeof(Entry) + free_.capacity() * sizeof(int32_t));
        const int64_t values[] = {own, used_, admitted_, expired_, bytes};
        std::copy(std::begin(values), std::end(values), out);
    }

  private:
    int64_t shared_row(int64_t id) const { return id >> o_.bits_per_shared_row; }

    size_t home(int64_t key) const { return size_t((uint64_t(key) * 0x9E3779B97F4A7C15u) >> shift_); }

    // Returns where the key is, or the empty entry where it belongs.
    size_t position(int64_t key) const {
        size_t at = home(key);
        while (entries_[at].key >= 0 && entries_[at].key != key) at = (at + 1) & mask_;
        return at;
    }

    bool is_expired(const Entry& entry, int64_t clock) const {
        return o_.expire_after && clock - entry.last >= o_.expire_after;
    }

    // Counts an occurrence. Returns the entry's position; -1 if the key is unknown and loses the toss.
    int64_t meet(int64_t key, int64_t clock) {
        const size_t at = position(key);
        Entry& entry = entries_[at];
        if (entry.key >= 0 && is_expired(entry, clock)) release(entry);
        if (o_.tosses_coin && (entry.key < 0 || entry.row < 0)) {
            const uint64_t toss = random_bits(random_bits(o_.coin_stream, uint64_t(key)), uint64_t(clock)) >> 11;
            if (toss >= o_.coin_limit) return -1;
        }
        if (entry.key < 0) {
            entry = {key, clock, 0, -1};
            ++used_;
        }
        entry.last = clock;
        entry.count += entry.count != UINT32_MAX;
        return int64_t(at);
    }

    void release(Entry& entry) {
        if (entry.row >= 0) {
            free_.push_back(entry.row);
            ++expired_;
        }
        entry.row = -1;
        entry.count = 0;
    }

    int32_t new_row(int64_t clock) {
        if (next_row_ == o_.max_rows && free_.empty() && o_.expire_after)
            for (Entry& entry : entries_)
                if (entry.key >= 0 && is_expired(entry, clock)) release(entry);
        if (!free_.empty()) {
            const int32_t row = free_.back();
            free_.pop_back();
            return row;
        }
        return next_row_ < o_.max_rows ? int32_t(o_.shared_rows + next_row_++) : -1;
    }

    void sweep(int64_t clock) {
        for (Entry& entry : entries_) {
            if (entry.key < 0 || !is_expired(entry, clock)) continue;
            release(entry);
            entry.key = -1;
            --used_;
        }
        rebuild(entries_.size());
    }

    void reserve(int64_t more) {
        size_t size = entries_.size();
        while (size_t(std::min(used_ + more, o_.max_entries + 1)) > size / 2) size *= 2;
        if (size != entries_.size()) rebuild(size);
    }

    void rebuild(size_t size) {
        std::vector<Entry> old(size, Entry{-1, 0, 0, -1});
        old.swap(entries_);
        mask_ = size - 1;
        for (shift_ = 64; size > 1; size /= 2) --shift_;
        for (const Entry& entry : old)
            if (entry.key >= 0) entries_[position(entry.key)] = entry;
    }

    const Options o_;
    std::vector<Entry> entries_;
    size_t mask_ = 0;
    int shift_ = 64;
    int64_t used_ = 0, next_row_ = 0, admitted_ = 0, expired_ = 0;
    std::vector<int32_t> free_;
};

}  // namespace

extern "C" {

void* keys_open(const Options* options) { return new KeyTable(*options); }
void keys_close(void* table) { delete static_cast<KeyTable*>(table); }
// Counts a batch of each table: ids[firsts[t]] to ids[ends[t]]. Writes `rows`, `new_keys` and `new_rows` at the same
// places, and what KeyTable::train returns to `counts`.
void keys_train(void* const* tables, int64_t num_tables, const int64_t* clocks, const int64_t* firsts, const int64_t* ends,
                const int64_t* ids, int64_t* rows, int64_t* new_keys, int64_t* new_rows, int64_t* counts) {
#pragma omp parallel for schedule(dynamic, 1) if (num_tables > 1)
    for (int64_t t = 0; t < num_tables; ++t) {
        const int64_t at = firsts[t];
        counts[t] = static_cast<KeyTable*>(tables[t])
                        ->train(ids + at, ends[t] - at, clocks[t], rows + at, new_keys + at, new_rows + at);
    }
}
int64_t keys_find(void* table, const int64_t* ids, int64_t count, int64_t clock, int64_t only_own, int64_t* rows) {
    return static_cast<KeyTable*>(table)->find(ids, count, clock, only_own != 0, rows);
}
int64_t keys_copy(void* table, int64_t clock, int64_t* keys, int64_t* lasts, int64_t* counts, int64_t* rows) {
    return static_cast<KeyTable*>(table)->copy(clock, keys, lasts, counts, rows);
}
int64_t keys_load(void* table, const int64_t* keys, const int64_t* lasts, const int64_t* counts, int64_t* rows,
                  int64_t count) {
    return static_cast<KeyTable*>(table)->load(keys, lasts, counts, rows, count);
}
void keys_clear(void* table) { static_cast<KeyTable*>(table)->clear(); }
void keys_facts(void* table, int64_t* out) { static_cast<KeyTable*>(table)->facts(out); }

// Writes the first values of keys: functions of (stream, key, column).
void keys_first_values(uint64_t stream, const int64_t* keys, int64_t count, int64_t dim, float scale, float bound,
                       float* out) {
    for (int64_t i = 0; i < count; ++i) {
        const uint64_t own = random_bits(stream, uint64_t(keys[i]));
        for (int64_t c = 0; c < dim; c += 2) {
            const uint64_t bits = random_bits(own, uint64_t(c / 2));
            out[i * dim + c] = float(uint32_t(bits) >> 8) * scale - bound;
            if (c + 1 < dim) out[i * dim + c + 1] = float(uint32_t(bits >> 32) >> 8) * scale - bound;
        }
    }
}

}  // extern "C"
