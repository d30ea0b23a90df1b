// The target dovetail_test_headers needs a source; its precompiled headers are what it is for.
