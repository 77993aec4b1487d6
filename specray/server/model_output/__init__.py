"""The text that a model generates, separated into reasoning, content and tool calls as it arrives."""
