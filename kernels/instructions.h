// What this processor has, found by code that needs none of it.

#if defined(__x86_64__)
static bool has_avx2() { // a compiler may have no name for f16c
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static bool has_avx512vnni() {
  return has_avx2() && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

static bool is_zen5() { // or a later processor of AMD; not every compiler has a name for it
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __builtin_cpu_is("amd") && __get_cpuid(1, &a, &b, &c, &d) && (a >> 8 & 15) + (a >> 20 & 255) >= 26;
}

static decltype(Instructions::multiply) avx512vnni_multiplication() {
  if (is_zen5()) return multiply_by<Avx512Vnni, 1>;
  return multiply_by<Avx512Vnni, 4>;
}

#ifdef HAS_AVXVNNI
static bool has_avxvnni() { // g++ 12 has no name for it
  unsigned a = 0, b = 0, c = 0, d = 0;
  return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
}
#endif

static bool has_least() { return has_avx2(); } // all other code of the operators has it, too
#else
static bool has_dotprod() { return getauxval(AT_HWCAP) & HWCAP_ASIMDDP; }

static bool has_least() { return true; }
#endif

// The fastest first.
static const Instructions INSTRUCTIONS[] = {
#if defined(__x86_64__)
    {"avx512vnni", has_avx512vnni, 32, 4, false, 0, 16, quantize_avx512, avx512vnni_multiplication(), true,
     multiply_by<Int4Avx512Vnni, 1>},
#ifdef HAS_AVXVNNI
    {"avxvnni", has_avxvnni, 16, 4, false, 0, 12, quantize, multiply_by<AvxVnni>, false, multiply_by<Int4Avx2>},
#endif
    {"avx2", has_avx2, 16, 2, true, 0, 8, quantize, multiply_by<Avx2>, false, multiply_by<Int4Avx2>},
#else
    {"dotprod", has_dotprod, 16, 4, false, -128, 8, quantize, multiply_by<DotProd>, false, multiply_by<Int4DotProd>},
#endif
    {"scalar", has_least, 32, 1, true, 0, 2, quantize, multiply_by<Scalar>, false, multiply_by<Int4Scalar>},
};

// The instructions of a name, or without one the fastest that this processor has; null if it does not have those.
static const Instructions *find_instructions(const char *wanted) {
  for (const Instructions &each : INSTRUCTIONS)
    if ((!wanted || !*wanted || !strcmp(wanted, each.name)) && each.run_here()) return &each;
  return nullptr;
}

// Those that SEQ2SEQ_ISA names, or the fastest.
static const Instructions *instructions_here() { return find_instructions(getenv("SEQ2SEQ_ISA")); }

// Whether floats are multiplied in vectors of sixteen: where this processor has them, unless SEQ2SEQ_ISA names others.
static bool has_sixteens() {
#if defined(__x86_64__)
  const char *wanted = getenv("SEQ2SEQ_ISA");
  return (!wanted || !*wanted || !strcmp(wanted, "avx512vnni")) && __builtin_cpu_supports("avx512f");
#else
  return false;
#endif
}

#if !defined(__x86_64__)
#define multiply_in_sixteens multiply_in_eights
using TermsInSixteens = TermsInEights;
#endif

static decltype(FloatMap::multiply) float_multiplication(bool are_halves) {
  if (are_halves) return has_sixteens() ? multiply_in_sixteens<Half> : multiply_in_eights<Half>;
  return has_sixteens() ? multiply_in_sixteens<float> : multiply_in_eights<float>;
}

static decltype(Terms::add) addition_of_terms() {
  return has_sixteens() ? add_terms<TermsInSixteens> : add_terms<TermsInEights>;
}
