"""From messages to token ids: the model's own chat template and tokenizer."""

from rollyard_pipeline.chat.format import ChatFormat, ChatMessage, FormatCache

__all__ = ["ChatFormat", "ChatMessage", "FormatCache"]
