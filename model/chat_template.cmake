# Chat templates: lexer, parser, interpreter and built-ins of the bounded Jinja subset.
dovetail_library(chat_template
  SRCS chat_template/access.cc chat_template/builtin_templates.cc chat_template/chat_template.cc chat_template/evaluate.cc chat_template/filters.cc
       chat_template/filters_text.cc chat_template/format.cc chat_template/interpreter.cc chat_template/json.cc
       chat_template/lexer.cc chat_template/methods.cc chat_template/operators.cc chat_template/parser.cc
       chat_template/parser_expressions.cc chat_template/python_repr.cc chat_template/runtime.cc chat_template/template_source.cc
       chat_template/tests_and_globals.cc chat_template/text.cc chat_template/text_ops.cc chat_template/unicode.cc
       chat_template/value.cc
  DEPS dovetail_base nlohmann_json::nlohmann_json
  PRIVATE_DEPS PkgConfig::UTF8PROC
  ALONE chat_template/filters_text.cc chat_template/methods.cc)
