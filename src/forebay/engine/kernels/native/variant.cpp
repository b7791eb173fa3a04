// One instruction set's kernels; compiled once for each with its own flags and FOREBAY_VARIANT.
#include "attention.h"
#include "linear.h"
#include "ranks.h"
#include "rowops.h"

#define FB_STRING(x) #x
#define FB_NAME(x) FB_STRING(x)
#define FB_JOIN(a, b) a##b
#define FB_EXPORT(name) FB_JOIN(variant_, name)

namespace forebay {

extern const Variant FB_EXPORT(FOREBAY_VARIANT);
const Variant FB_EXPORT(FOREBAY_VARIANT) = {
    FB_NAME(FOREBAY_VARIANT),
    {FOREBAY_VARIANT::linear, FOREBAY_VARIANT::grouped_linear, FOREBAY_VARIANT::embed, FOREBAY_VARIANT::rms_norm,
     FOREBAY_VARIANT::add_rms_norm, FOREBAY_VARIANT::rope_store, FOREBAY_VARIANT::attention,
     FOREBAY_VARIANT::latent_store, FOREBAY_VARIANT::gated, FOREBAY_VARIANT::argmax, FOREBAY_VARIANT::pack,
     FOREBAY_VARIANT::gated_linear, FOREBAY_VARIANT::embed_packed, FOREBAY_VARIANT::combine, FOREBAY_VARIANT::embed_part,
     FOREBAY_VARIANT::all_reduce, FOREBAY_VARIANT::gather_columns},
};

}  // namespace forebay
