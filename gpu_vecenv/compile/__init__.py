"""From source to binary: generated C++, source rules, compilers and drivers, the cache of binaries, programs."""
