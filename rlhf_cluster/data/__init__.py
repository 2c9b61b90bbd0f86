"""Prompts and preference pairs: from JSONL rows to rendered token ids, and the cursor that issues them."""
