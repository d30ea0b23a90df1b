#pragma once
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace dovetail::model::jinja {

// A UTF-8 string in which every byte knows whether it came from the conversation (input) or from the template.
//
// Offsets are bytes. Flags are stored as the offsets at which they flip, so a uniform string costs one bool.
// Threads: thread-compatible; a value.
class Text {
 public:
  Text() = default;
  Text(std::string bytes, bool is_input) : bytes_(std::move(bytes)), first_is_input_(is_input) {}

  std::string_view view() const { return bytes_; }
  size_t size() const { return bytes_.size(); }
  bool empty() const { return bytes_.empty(); }
  bool HasInput() const { return !empty() && (first_is_input_ || !switches_.empty()); }
  bool IsInputAt(size_t offset) const;
  // Bytes held: what copying this text is charged for.
  size_t Cost() const { return bytes_.size() + sizeof(size_t) * switches_.size(); }

  // Jinja's Markup: text that counts as HTML-escaped. What is added to it gets escaped; only `safe` and `escape` make
  // it.
  bool is_markup() const { return is_markup_; }
  void set_markup(bool is_markup) { is_markup_ = is_markup; }

  void Append(std::string_view bytes, bool is_input);
  void Append(const Text& other);
  Text Slice(size_t begin, size_t end) const;

  // Calls visit(bytes, is_input) for each maximal run of equal flags, in order.
  template <typename Visit>
  void ForEachRun(Visit visit) const {
    size_t begin = 0;
    bool is_input = first_is_input_;
    for (size_t end : switches_) {
      visit(view().substr(begin, end - begin), is_input);
      begin = end;
      is_input = !is_input;
    }
    if (begin < size()) visit(view().substr(begin), is_input);
  }

 private:
  bool LastIsInput() const { return first_is_input_ != (switches_.size() % 2 == 1); }

  std::string bytes_;
  bool first_is_input_ = false;
  bool is_markup_ = false;
  std::vector<size_t> switches_;  // strictly increasing, inside (0, size)
};

}  // namespace dovetail::model::jinja
