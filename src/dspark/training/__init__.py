"""Training drafters: data, the target's features (online or stored), new drafters, the trainer."""

from ..objective import Objective, block_loss, build_blocks, sample_anchors
from .adapter import AdapterShape, adapt
from .arguments import TrainingConfig
from .bigram_start import Bigrams, bigram_start
from .builder import DrafterShape, default_target_layer_ids, new_drafter
from .collator import BlockCollator
from .data import AnswerDataset, DataError, read_answers
from .feature_index import FeaturesError, index_features
from .feature_writer import FeatureWriter
from .features import capture_features, target_logsumexp
from .meter import expected_accepted_length
from .offline import FeatureDataset
from .saving import save_drafter
from .shards import write_features
from .splits import JoinedFeatures, hold_out
from .trainer import DSparkTrainer
from .vocabulary import choose_mask_token, draft_vocab_from_counts

__all__ = [
    "AdapterShape",
    "AnswerDataset",
    "Bigrams",
    "BlockCollator",
    "DSparkTrainer",
    "DataError",
    "DrafterShape",
    "FeatureDataset",
    "FeatureWriter",
    "FeaturesError",
    "JoinedFeatures",
    "Objective",
    "TrainingConfig",
    "adapt",
    "bigram_start",
    "block_loss",
    "build_blocks",
    "capture_features",
    "choose_mask_token",
    "default_target_layer_ids",
    "draft_vocab_from_counts",
    "expected_accepted_length",
    "hold_out",
    "index_features",
    "new_drafter",
    "read_answers",
    "sample_anchors",
    "save_drafter",
    "target_logsumexp",
    "write_features",
]
