#include "server/openai/message_documents.h"

#include "absl/strings/str_cat.h"
#include "server/openai/chat_body.h"

namespace dovetail::server {
namespace {

absl::Status RefuseCitations(const FieldReader& block) {
  const Json* value = block.Find("citations");
  if (value == nullptr || value->is_null()) return absl::OkStatus();
  if (!value->is_object()) return BadField(block.Path("citations"), "must be an object, not ", Describe(*value));
  const FieldReader citations(*value, block.Path("citations"));
  DT_ASSIGN_OR_RETURN(const bool enabled, citations.Bool("enabled", false));
  if (enabled) return BadField(citations.Path("enabled"), "answers cite nothing here; give false, or leave it out");
  return absl::OkStatus();
}

// Nothing where the field is null, or is not there.
absl::StatusOr<std::string> LineOf(const FieldReader& block, const char* name) {
  const Json* value = block.Find(name);
  if (value == nullptr || value->is_null()) return "";
  if (!value->is_string()) return BadField(block.Path(name), "must be a string, not ", Describe(*value));
  const std::string& line = value->get_ref<const std::string&>();
  return line.empty() ? "" : absl::StrCat(line, "\n");
}

absl::StatusOr<std::string> PlainText(const FieldReader& source) {
  if (const Json* media = source.Find("media_type"); media != nullptr && *media != "text/plain")
    return BadField(source.Path("media_type"), "must be \"text/plain\", not ", Describe(*media));
  const Json* data = source.Find("data");
  if (data == nullptr || !data->is_string()) return BadField(source.Path("data"), "must be a string");
  return data->get<std::string>();
}

absl::StatusOr<std::string> TextOfBlocks(const FieldReader& source) {
  const Json* content = source.Find("content");
  if (content == nullptr)
    return BadField(source.Path("content"), "is required: a string, or an array of blocks of text");
  DT_ASSIGN_OR_RETURN(const Json texts, TextContent(*content, source.Path("content"), {"text"}));
  if (texts.is_string()) return texts.get<std::string>();
  std::string all;
  for (const Json& text : texts)
    absl::StrAppend(&all, all.empty() ? "" : "\n", text["text"].get_ref<const std::string&>());
  return all;
}

absl::StatusOr<std::string> SourceText(const FieldReader& source) {
  DT_ASSIGN_OR_RETURN(const auto type, source.String("type", 64));
  if (!type) return BadField(source.Path("type"), "is required: text, or content");
  if (*type == "text") return PlainText(source);
  if (*type == "content") return TextOfBlocks(source);
  return BadField(source.Path("type"), Describe(Json(*type)),
                  " is not supported: only text and content are; this server reads no PDF files, links or images");
}

}  // namespace

absl::StatusOr<std::string> DocumentText(const FieldReader& block) {
  DT_RETURN_IF_ERROR(RefuseCitations(block));
  DT_ASSIGN_OR_RETURN(const std::string title, LineOf(block, "title"));
  DT_ASSIGN_OR_RETURN(const std::string context, LineOf(block, "context"));
  const Json* value = block.Find("source");
  if (value == nullptr || !value->is_object()) return BadField(block.Path("source"), "must be an object with type");
  DT_ASSIGN_OR_RETURN(const std::string text, SourceText(FieldReader(*value, block.Path("source"))));
  return absl::StrCat(title, context, text);
}

}  // namespace dovetail::server
