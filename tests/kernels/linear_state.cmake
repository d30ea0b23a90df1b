dovetail_test(linear_state_test SRCS linear_state_test.cc moe_test.cc short_convolution_test.cc
              DEPS dovetail_kernels)
