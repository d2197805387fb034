"""The conversion of messages to token ids by the model's own chat template and tokenizer."""

from rollyard_pipeline.chat.format import ChatFormat, ChatMessage, FormatCache

__all__ = ["ChatFormat", "ChatMessage", "FormatCache"]
