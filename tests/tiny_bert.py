"""A BERT of two narrow layers with a small WordPiece vocabulary, written to a folder: a model without a network."""

from pathlib import Path

import torch

WORDS = "what is the capital area of texas ohio river how long state answer count ( ) , . stateid all ##s ##ing a b c"


def tiny_bert(folder: Path, *, seed: int = 0, words: str = WORDS, hidden: int = 16, positions: int = 40) -> str:
    """Write the model; returns the folder as a string."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: n for n, word in enumerate([*specials, *words.split()])}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=positions, **names).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=positions,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        BertModel(config).save_pretrained(folder)
    return str(folder)


def knowing(examples, folder: Path) -> str:
    """One whose vocabulary is the words of examples' questions and programs."""
    words = sorted({word for e in examples for word in f"{e.source} {e.target}".lower().split()})
    return tiny_bert(folder, words=" ".join(words), positions=64)
