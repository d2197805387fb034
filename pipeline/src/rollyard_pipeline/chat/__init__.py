"""From messages to token ids: the model's own chat template and tokenizer."""

from rollyard_pipeline.chat.format import ChatFormat, ChatMessage, FormatCache
from rollyard_pipeline.chat.template import ChatTemplate
from rollyard_pipeline.chat.tokenizer import ChatTokenizer

__all__ = ["ChatFormat", "ChatMessage", "ChatTemplate", "ChatTokenizer", "FormatCache"]
