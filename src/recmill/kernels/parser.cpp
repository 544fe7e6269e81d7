// The fields of plain texts: found, hashed and numbered. The Python sides are datasets/inputs/fields.py and
// datasets/own_clicks/coding.py.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the first letter of a word is its lowest byte");

namespace {

constexpr int64_t kWord = 8;  // letters
constexpr uint64_t kEach = 0x0101010101010101u;  // times a letter: a word of it
constexpr uint64_t kLowBits = 0x7F7F7F7F7F7F7F7Fu;
constexpr int kFirstBits = 12;
constexpr int kLargeBits = 14;  // a table with more slots does not fit into the first cache
constexpr int kAhead = 16;  // values whose slots are fetched before they are needed

struct Key {
    uint64_t one, other;
    bool operator==(const Key& key) const { return one == key.one && other == key.other; }
};

// The letters from `at` on, with zeros behind the end of the text.
uint64_t word_at(const uint8_t* text, int64_t size, int64_t at) {
    uint64_t word = 0;
    if (at + kWord <= size) {
        std::memcpy(&word, text + at, kWord);
    } else {
        std::memcpy(&word, text + at, size - at);
    }
    return word;
}

// The top bits of the letters that are 0.
uint64_t tops_of_zeros(uint64_t word) { return ~(((word & kLowBits) + kLowBits) | word | kLowBits); }

// A bit for each of the 64 letters from `at` on that is `separators` or a line end.
uint64_t ends_from(const uint8_t* text, int64_t size, int64_t at, uint64_t separators) {
    uint64_t ends = 0;
    for (int64_t i = 0; i < 64 && at + i < size; i += kWord) {
        const uint64_t word = word_at(text, size, at + i);
        const uint64_t tops = tops_of_zeros(word ^ separators) | tops_of_zeros(word ^ kEach * '\n');
        ends |= ((tops >> 7) * 0x0102040810204080u >> 56) << i;
    }
    return ends;
}

// The shifts differ, so that words which cancel out in one hash do not in the other.
Key mixed(Key key, uint64_t word) {
    key.one = (key.one ^ word) * 0x9E3779B97F4A7C15u;
    key.other = (key.other ^ word) * 0xC2B2AE3D27D4EB4Fu;
    return {key.one ^ key.one >> 32, key.other ^ key.other >> 29};
}

// No letter is 0, so texts of up to eight letters have different first hashes; their second one is 0.
Key hashed(const uint8_t* text, int64_t size, int64_t start, int64_t end) {
    Key key = {0xCBF29CE484222325u, 0xCBF29CE484222325u};
    const bool is_long = end - start > kWord;
    for (; end - start > kWord; start += kWord) key = mixed(key, word_at(text, size, start));
    const uint64_t mask = end > start ? ~uint64_t{0} >> (64 - 8 * (end - start)) : 0;
    key = mixed(key, word_at(text, size, start) & mask);
    return {key.one, is_long ? key.other | 1 : 0};
}

// Writes the id of each code into `ids` [row, place], and adds to `counts` [column, 2] how many of a column are 0 and 1.
template <class Id>
void look_up(const Id* const* tables, const uint32_t* const* codes, const int64_t* places, int64_t num_columns,
             int64_t num_rows, int64_t width, Id* ids, int64_t* counts) {
    constexpr int64_t kTile = 256;  // rows of `ids` that stay in the first cache while all columns are written
    for (int64_t start = 0; start < num_rows; start += kTile) {
        const int64_t end = std::min(start + kTile, num_rows);
        for (int64_t column = 0; column < num_columns; ++column) {
            int64_t zeros = 0, ones = 0;
            for (int64_t row = start; row < end; ++row) {
                const Id id = tables[column][codes[column][row]];
                ids[row * width + places[column]] = id;
                zeros += id == 0;
                ones += id == 1;
            }
            counts[2 * column] += zeros;
            counts[2 * column + 1] += ones;
        }
    }
}

int64_t field_end(const uint8_t* text, int64_t at, uint8_t separator) {
    while (text[at] != separator && text[at] != '\n') ++at;
    return at;
}

// Numbers values in the order in which they occur first.
class Coder {
  public:
    Coder() : slots_(size_t{1} << kFirstBits) {}

    // Writes the code of each value and appends the rows of new ones to `new_rows`. Returns how many are new. Without
    // `others`, all second hashes are 0.
    int64_t number(const uint64_t* hashes, const uint64_t* others, int64_t count, uint32_t* codes, int64_t* new_rows) {
        const size_t before = keys_.size();
        for (int64_t row = 0; row < count; ++row) {
            if (bits_ > kLargeBits && row + kAhead < count) {
                __builtin_prefetch(&slots_[home(hashes[row + kAhead])]);
                const uint32_t next = slots_[home(hashes[row + kAhead / 2])];
                if (next) __builtin_prefetch(&keys_[next - 1]);
            }
            const Key key = {hashes[row], others ? others[row] : 0};
            size_t slot = home(key.one);
            while (slots_[slot] && !(keys_[slots_[slot] - 1] == key)) slot = next_slot(slot);
            if (!slots_[slot]) {
                keys_.push_back(key);
                slots_[slot] = static_cast<uint32_t>(keys_.size());
                *new_rows++ = row;
            }
            codes[row] = slots_[slot] - 1;
            if (2 * keys_.size() > slots_.size()) grow();
        }
        return static_cast<int64_t>(keys_.size() - before);
    }

  private:
    // The top bits of the hash of a short text depend on all its letters.
    size_t home(uint64_t hash) const { return hash >> (64 - bits_); }
    size_t next_slot(size_t slot) const { return (slot + 1) & (slots_.size() - 1); }

    void grow() {
        slots_.assign(2 * slots_.size(), 0);
        ++bits_;
        for (size_t code = 0; code < keys_.size(); ++code) {
            size_t slot = home(keys_[code].one);
            while (slots_[slot]) slot = next_slot(slot);
            slots_[slot] = static_cast<uint32_t>(code + 1);
        }
    }

    int bits_ = kFirstBits;
    std::vector<uint32_t> slots_;  // code + 1, or 0
    std::vector<Key> keys_;  // by code
};

}  // namespace

extern "C" {

// Returns the number of lines, or -1 if a letter is 0, a carriage return or `quote` (0: none).
// `is_ascii` becomes 0 if a letter is not.
int64_t parser_lines(const uint8_t* text, int64_t size, int64_t quote, int64_t* is_ascii) {
    int64_t lines = 0;
    uint8_t all = 0;
    for (int64_t start = 0; start < size; start += 128) {
        const int64_t count = size - start < 128 ? size - start : 128;
        uint8_t found = 0, bad = 0;
        for (int64_t i = start; i < start + count; ++i) {
            const uint8_t letter = text[i];
            found = static_cast<uint8_t>(found + (letter == '\n'));
            bad |= static_cast<uint8_t>((letter == 0) | (letter == '\r') | (letter == static_cast<uint8_t>(quote)));
            all |= letter;
        }
        if (bad) return -1;
        lines += found;
    }
    *is_ascii = all < 128;
    return lines;
}

// Finds and hashes the fields of the columns whose place is not negative: `starts` [place, row] and two `hashes`
// [hash, place, row]. The second ones are written only for columns with a long field, which get a 1 in `has_long`
// [place], because memory bounds the speed. Every line ends with a line end. Returns 0 if a row does not have
// `num_columns` fields.
int64_t parser_divide(const uint8_t* text, int64_t size, int64_t separator, const int64_t* places, int64_t num_columns,
                      int64_t num_places, int64_t num_rows, uint32_t* starts, uint64_t* hashes, uint8_t* has_long) {
    const uint64_t separators = static_cast<uint64_t>(separator) * kEach;
    uint64_t* others = hashes + num_places * num_rows;
    int64_t row = 0, column = 0, start = 0;
    for (int64_t at = 0; at < size; at += 64) {
        for (uint64_t ends = ends_from(text, size, at, separators); ends; ends &= ends - 1) {
            const int64_t end = at + __builtin_ctzll(ends);
            if (const int64_t place = places[column]; place >= 0) {
                const int64_t index = place * num_rows + row;
                const Key key = hashed(text, size, start, end);
                starts[index] = static_cast<uint32_t>(start);
                hashes[index] = key.one;
                if (key.other && !has_long[place]) {
                    has_long[place] = 1;
                    std::fill_n(others + place * num_rows, row, 0);
                }
                if (has_long[place]) others[index] = key.other;
            }
            const bool is_line = text[end] == '\n';
            if (is_line != (column == num_columns - 1)) return 0;
            row += is_line;
            column = is_line ? 0 : column + 1;
            start = end + 1;
        }
    }
    return 1;
}

// Writes the fields that begin at `starts` of these rows, each followed by a line end, unless `joined` is null.
// Returns their bytes.
int64_t parser_join(const uint8_t* text, const uint32_t* starts, const int64_t* rows, int64_t num_rows,
                    int64_t separator, uint8_t* joined) {
    int64_t size = 0;
    for (int64_t i = 0; i < num_rows; ++i) {
        const int64_t start = starts[rows[i]];
        const int64_t length = field_end(text, start, static_cast<uint8_t>(separator)) - start;
        if (joined) {
            std::memcpy(joined + size, text + start, length);
            joined[size + length] = '\n';
        }
        size += length + 1;
    }
    return size;
}

// Returns null if there is not enough memory.
void* parser_new_coder() {
    try {
        return new Coder;
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void parser_delete_coder(Coder* coder) { delete coder; }

// Returns what `Coder::number` does, or -1 if there is not enough memory.
int64_t parser_number(Coder* coder, const uint64_t* hashes, const uint64_t* others, int64_t count, uint32_t* codes,
                      int64_t* new_rows) {
    try {
        return coder->number(hashes, others, count, codes, new_rows);
    } catch (const std::bad_alloc&) {
        return -1;
    }
}

// Does what `look_up` does, for ids of 4 or 8 bytes.
void parser_look_up(const void* tables, const uint32_t* const* codes, const int64_t* places, int64_t num_columns,
                    int64_t num_rows, int64_t width, int64_t id_bytes, void* ids, int64_t* counts) {
    if (id_bytes == 4) {
        look_up(static_cast<const int32_t* const*>(tables), codes, places, num_columns, num_rows, width,
                static_cast<int32_t*>(ids), counts);
    } else {
        look_up(static_cast<const int64_t* const*>(tables), codes, places, num_columns, num_rows, width,
                static_cast<int64_t*>(ids), counts);
    }
}

// Adds to `counts` how often each code occurs.
void parser_add_up(int64_t* counts, const uint32_t* codes, int64_t num_codes) {
    for (int64_t i = 0; i < num_codes; ++i) ++counts[codes[i]];
}
}
