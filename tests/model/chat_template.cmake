dovetail_test(chat_template_test
  SRCS chat_template_golden_test.cc
  DEPS dovetail_chat_template)
