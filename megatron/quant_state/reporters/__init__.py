# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""What a result looks like: a table, JSON, or one HTML page that works offline."""
