dovetail_test(chat_template_test
  SRCS chat_template_golden_test.cc chat_template_input_test.cc chat_template_language_test.cc chat_template_limits_test.cc
       chat_template_source_test.cc
  DEPS dovetail_chat_template)
