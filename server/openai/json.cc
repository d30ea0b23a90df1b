#include "server/openai/json.h"

#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"

namespace dovetail::server {
namespace {

// Builds the value while it counts. nlohmann's own builder has neither limits nor an opinion on duplicate keys.
class Builder {
 public:
  explicit Builder(const JsonLimits& limits) : limits_(limits) {}

  bool null() { return Put(Json()) != nullptr; }
  bool boolean(bool value) { return Put(value) != nullptr; }
  bool number_integer(int64_t value) { return Put(value) != nullptr; }
  bool number_unsigned(uint64_t value) { return Put(value) != nullptr; }
  bool number_float(double value, const std::string&) { return Put(value) != nullptr; }
  bool string(std::string& value) { return Put(std::move(value)) != nullptr; }
  bool binary(Json::binary_t&) { return false; }
  bool start_object(size_t) { return Open(Json::object()); }
  bool start_array(size_t) { return Open(Json::array()); }
  bool end_object() { return Close(); }
  bool end_array() { return Close(); }

  bool key(std::string& name) {
    if (!open_.back().keys.insert(name).second)
      return Fail(absl::StrCat("the key \"", Shortened(name), "\" comes twice in one object"));
    open_.back().key = std::move(name);
    return true;
  }

  template <typename Exception>
  bool parse_error(size_t byte, const std::string&, const Exception&) {
    return Fail(absl::StrCat("not valid JSON at byte ", byte));
  }

  absl::StatusOr<Json> Finish(bool parsed) {
    if (!status_.ok()) return status_;
    if (!parsed) return InvalidArgument("the request body is not valid JSON");
    return std::move(root_);
  }

 private:
  struct Level {
    Json* value;
    std::string key;
    absl::flat_hash_set<std::string> keys;
  };

  static std::string Shortened(const std::string& name) { return name.size() <= 64 ? name : "(a long one)"; }

  bool Fail(const std::string& what) {
    if (status_.ok()) status_ = InvalidArgument("the request body: ", what);
    return false;
  }

  Json* Put(Json value) {
    if (++values_ > limits_.values) {
      Fail(absl::StrCat("more than ", limits_.values, " values"));
      return nullptr;
    }
    if (open_.empty()) return &(root_ = std::move(value));
    Level& level = open_.back();
    if (level.value->is_array()) {
      auto& array = level.value->get_ref<Json::array_t&>();
      return &array.emplace_back(std::move(value));
    }
    auto& object = level.value->get_ref<Json::object_t&>();  // keys are known to be new: no search
    static_cast<std::vector<Json::object_t::value_type>&>(object).emplace_back(std::move(level.key), std::move(value));
    return &object.back().second;
  }

  bool Open(Json value) {
    if (static_cast<int>(open_.size()) >= limits_.depth)
      return Fail(absl::StrCat("nested deeper than ", limits_.depth, " levels"));
    Json* at = Put(std::move(value));
    if (at == nullptr) return false;
    open_.push_back({at, {}, {}});
    return true;
  }
  bool Close() {
    open_.pop_back();
    return true;
  }

  const JsonLimits limits_;
  Json root_;
  std::vector<Level> open_;  // a parent does not grow while its child is open, so the pointers hold
  size_t values_ = 0;
  absl::Status status_;
};

}  // namespace

absl::StatusOr<Json> ParseJson(std::string_view text, const JsonLimits& limits) {
  if (text.substr(0, 3) == "\xEF\xBB\xBF") return InvalidArgument("the request body: begins with a byte order mark");
  Builder builder(limits);
  const bool parsed = Json::sax_parse(text.begin(), text.end(), &builder, nlohmann::detail::input_format_t::json,
                                      /*strict=*/true, /*ignore_comments=*/false);
  return builder.Finish(parsed);
}

std::string Dump(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

}  // namespace dovetail::server
