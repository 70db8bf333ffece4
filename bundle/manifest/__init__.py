"""The bundle: a folder with everything needed to serve one model, and the manifest that describes it.

Export writes the manifest with `write_manifest`. The server reads a bundle with `load_bundle`, which checks
everything and reports all problems at once. The checked bytes are the bytes that are used: tokenizers are
created from them, and `Bundle.read_variant` reads graphs and weights into memory, so that a later change of a
file has no effect. How graphs are created or run is not known here.
"""

from seq2seq_serve.bundle.manifest.io import (
    MAX_MANIFEST_BYTES as MAX_MANIFEST_BYTES,
    MAX_TOKENIZER_BYTES as MAX_TOKENIZER_BYTES,
    Bundle as Bundle,
    BundleError as BundleError,
    WeightsLayout as WeightsLayout,
    Extent as Extent,
    VariantFiles as VariantFiles,
    bundle_version as bundle_version,
    file_spec as file_spec,
    is_checkpoint as is_checkpoint,
    load_bundle as load_bundle,
    write_manifest as write_manifest,
)
from seq2seq_serve.bundle.manifest.schema import (
    AdaptedMap as AdaptedMap,
    AdaptedPart as AdaptedPart,
    Choice as Choice,
    EarlyStopping as EarlyStopping,
    FileSpec as FileSpec,
    TokenTemplate as TokenTemplate,
    Generation as Generation,
    GraphSpec as GraphSpec,
    LengthBound as LengthBound,
    LengthPenalty as LengthPenalty,
    LengthRule as LengthRule,
    Manifest as Manifest,
    Parity as Parity,
    TemplateTokens as TemplateTokens,
    SpecialIds as SpecialIds,
    TensorSpec as TensorSpec,
    Timestamps as Timestamps,
    Variant as Variant,
)
