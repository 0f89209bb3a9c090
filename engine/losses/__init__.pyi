from ..huggingface import without_logits as without_logits
from .output_layer import linear_cross_entropy as linear_cross_entropy
from .output_layer import token_log_probs as token_log_probs
