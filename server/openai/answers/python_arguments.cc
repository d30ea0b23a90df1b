#include <string>
#include <utility>

#include "absl/strings/str_format.h"
#include "server/openai/answers/argument_reader.h"

namespace dovetail::server {
namespace {

constexpr size_t kMaxDepth = 64;
constexpr size_t kMaxWord = 64;  // of a name, a number, True

bool InWord(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '.' ||
         c == '+' || c == '-';
}

std::string JsonWord(const std::string& word) {
  if (word == "True") return "true";
  if (word == "False") return "false";
  if (word == "None") return "null";
  return word;
}

// A byte at a time. What cannot stand where it stands ends the arguments, and is not read.
class PythonArguments : public ArgumentReader {
 public:
  size_t Read(std::string_view text, bool, std::string& json) override {
    size_t read = 0;
    while (read < text.size() && !done_) {
      if (!Step(text[read], json)) {
        done_ = true;
        break;
      }
      ++read;
    }
    return read;
  }

 private:
  enum class State { kName, kStars, kValue, kWord, kString, kEscape, kHex, kAfter };

  bool Step(char c, std::string& json) {
    switch (state_) {
      case State::kName: return Name(c, json);
      case State::kStars: return Stars(c, json);
      case State::kValue: return Value(c, json);
      case State::kString: return String(c, json);
      case State::kEscape: return Escape(c, json);
      case State::kHex: return Hex(c, json);
      case State::kWord:
        if (InWord(c)) {
          word_ += c;
          return word_.size() <= kMaxWord;
        }
        json += JsonWord(std::exchange(word_, {}));
        state_ = State::kAfter;
        return After(c, json);
      case State::kAfter: return After(c, json);
    }
    return false;
  }

  // name=
  bool Name(char c, std::string& json) {
    if (word_.empty() && IsBlank(c)) return true;
    if (word_.empty() && c == '*') {
      state_ = State::kStars;
      return !begun_;
    }
    if (word_.empty() && c == ')') return End(json);
    if (InWord(c)) {
      word_ += c;
      return word_.size() <= kMaxWord;
    }
    if (IsBlank(c)) return true;
    if (c != '=' || word_.empty()) return false;
    json += begun_ ? ", \"" : "{\"";
    begun_ = true;
    json += std::exchange(word_, {}) + "\": ";
    state_ = State::kValue;
    return true;
  }

  // **{...}
  bool Stars(char c, std::string& json) {
    if (c == '*') return !std::exchange(two_stars_, true);
    if (c != '{' || !two_stars_) return false;
    whole_ = begun_ = true;
    state_ = State::kValue;
    return Value(c, json);
  }

  bool Value(char c, std::string& json) {
    if (IsBlank(c)) return true;
    if (!open_.empty() && c == open_.back()) return Close(json);
    if (std::exchange(comma_, false)) json += ", ";
    if (c == '"' || c == '\'') {
      quote_ = c;
      state_ = State::kString;
      json += '"';
      return true;
    }
    if (c == '{' || c == '[' || c == '(') {
      if (open_.size() >= kMaxDepth) return false;
      open_ += c == '{' ? '}' : c == '[' ? ']' : ')';
      json += c == '{' ? '{' : '[';
      return true;
    }
    if (!InWord(c)) return false;
    word_ = c;
    state_ = State::kWord;
    return true;
  }

  bool Close(std::string& json) {
    comma_ = false;
    json += open_.back() == '}' ? '}' : ']';
    open_.pop_back();
    state_ = State::kAfter;
    return true;
  }

  // Behind a value.
  bool After(char c, std::string& json) {
    if (IsBlank(c)) return true;
    if (open_.empty()) {
      if (c == ')') return End(json);
      state_ = State::kName;
      return c == ',' && !whole_;
    }
    if (c == open_.back()) return Close(json);
    if (c != ',' && !(c == ':' && open_.back() == '}')) return false;
    comma_ = c == ',';
    if (!comma_) json += ": ";
    state_ = State::kValue;
    return true;
  }

  bool End(std::string& json) {
    if (!whole_) json += begun_ ? "}" : "{}";
    done_ = true;
    return true;
  }

  bool String(char c, std::string& json) {
    if (c == quote_) {
      json += '"';
      state_ = State::kAfter;
    } else if (c == '\\') {
      state_ = State::kEscape;
    } else if (c == '"') {
      json += "\\\"";
    } else if (static_cast<unsigned char>(c) < 0x20) {
      json += absl::StrFormat("\\u%04x", static_cast<int>(c));
    } else {
      json += c;
    }
    return true;
  }

  bool Escape(char c, std::string& json) {
    state_ = State::kString;
    if (c == 'x' || c == 'u') {
      json += c == 'x' ? "\\u00" : "\\u";
      hex_left_ = c == 'x' ? 2 : 4;
      state_ = State::kHex;
      return true;
    }
    if (c == '\n') return true;  // the string goes on in the next line
    constexpr std::string_view kSame = "nrtbf\\\"/";
    if (c == '\'')
      json += c;
    else if (kSame.find(c) != std::string_view::npos)
      json += std::string{'\\', c};
    else
      json += "\\\\";
    return kSame.find(c) != std::string_view::npos || c == '\'' || String(c, json);
  }

  bool Hex(char c, std::string& json) {
    if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'))) return false;
    json += c;
    if (--hex_left_ == 0) state_ = State::kString;
    return true;
  }

  static bool IsBlank(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

  State state_ = State::kName;
  std::string word_, open_;  // open_: the brackets that close what is open
  char quote_ = 0;
  int hex_left_ = 0;
  bool comma_ = false, begun_ = false, whole_ = false, two_stars_ = false;
};

}  // namespace

std::unique_ptr<ArgumentReader> MakePythonArguments() { return std::make_unique<PythonArguments>(); }

}  // namespace dovetail::server
