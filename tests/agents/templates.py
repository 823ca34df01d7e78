"""Chat templates of our own in the shapes of model families: what comes in which order, and what is refused.

Only the order of the parts is theirs; the marks are shortened.
"""

from __future__ import annotations

_END = "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
_TOOLS = "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
_CALLS = (
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>\n{% endfor %}"
)
_TURN = (
    "{% if message.role == 'tool' %}<|user|>\n<tool_response>\n{{ message.content }}\n</tool_response><|end|>\n"
    "{% else %}<|{{ message.role }}|>\n{{ message.content }}" + _CALLS + "<|end|>\n{% endif %}"
)
_REST = (
    "{% for message in messages %}{% if not (loop.first and message.role == 'system') %}"
    + _TURN
    + "{% endif %}{% endfor %}"
)
_SYSTEM = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
_ALTERNATE = (
    "{% set ns = namespace(last='assistant') %}{% for message in messages %}{% if message.role in ['user', 'assistant'] and not message.tool_calls %}"
    "{% if message.role == ns.last %}{{ raise_exception('roles must alternate user and assistant') }}{% endif %}"
    "{% set ns.last = message.role %}{% endif %}{% endfor %}"
)

NO_TOOLS = "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|end|>\n{% endfor %}" + _END
"""SmolLM2: knows no tools, and loses calls."""

HERMES = (
    "{% if tools %}<|system|>\nYou may call:\n" + _TOOLS + "{{ '\\n' }}" + _SYSTEM + "<|end|>\n"
    "{% elif messages[0].role == 'system' %}<|system|>\n" + _SYSTEM + "<|end|>\n{% endif %}" + _REST + _END
)
"""Hermes: tools, then the system message."""

QWEN = (
    "<|system|>\n{% if messages[0].role == 'system' %}" + _SYSTEM + "{% else %}You are a helpful assistant.{% endif %}"
    "{% if tools %}\n\n# Tools\n" + _TOOLS + "{% endif %}<|end|>\n" + _REST + _END
)
"""Qwen2.5: the system message or a default one, then tools in it."""

LLAMA = (
    "<|system|>\nCutting knowledge: 2023\n" + _SYSTEM + "<|end|>\n{% set ns = namespace(told=false) %}"
    "{% for message in messages %}{% if not (loop.first and message.role == 'system') %}"
    "{% if message.role == 'user' and tools and not ns.told %}<|user|>\nCall one of these with JSON:\n"
    + _TOOLS
    + "{{ message.content }}<|end|>\n{% set ns.told = true %}"
    "{% elif message.role == 'tool' %}<|ipython|>\n{{ message.content | tojson }}<|end|>\n"
    "{% elif message.tool_calls %}{% if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    '<|assistant|>\n{"name": "{{ message.tool_calls[0].function.name }}", "parameters": {{ message.tool_calls[0].function.arguments | tojson }}}'
    "{{ message.content }}<|end|>\n{% else %}<|{{ message.role }}|>\n{{ message.content }}<|end|>\n{% endif %}{% endif %}{% endfor %}"
    + _END
)
"""Llama 3.1: tools in the first user turn, one call an answer."""

MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\\n\\n' %}{% set messages = messages[1:] %}"
    "{% else %}{% set system = '' %}{% endif %}"
    + _ALTERNATE
    + "{% for message in messages %}{% if message.role == 'user' %}"
    "{% if loop.last and tools %}[AVAILABLE_TOOLS]" + _TOOLS + "[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{% if loop.last %}{{ system }}{% endif %}{{ message.content }}[/INST]"
    "{% elif message.role == 'tool' %}{% if message.tool_call_id | length != 9 %}{{ raise_exception('call ids have nine letters') }}{% endif %}"
    "[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]"
    "{% elif message.tool_calls %}[TOOL_CALLS][{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}]{{ message.content }}</s>"
    "{% elif message.role == 'assistant' %}{{ message.content }}</s>"
    "{% else %}{{ raise_exception('only user, assistant and tool') }}{% endif %}{% endfor %}"
)
"""Mistral: the system message and the tools before the last user turn, strict alternation, ids of nine letters."""

GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + _ALTERNATE
    + "{% for message in messages %}{% if message.role not in ['user', 'assistant'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "<start_of_turn>{{ 'model' if message.role == 'assistant' else 'user' }}\n{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
"""Gemma: no system role, no tools, alternation."""

PHI = (
    "{% for message in messages %}{% if message.role == 'system' and tools %}<|system|>{{ message.content }}<|tool|>"
    + _TOOLS
    + "<|/tool|><|end|>{% else %}<|{{ message.role }}|>{{ message.content }}"
    + _CALLS
    + "<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Phi-4-mini: tools between marks at the end of the system turn, and nowhere if there is none."""

DEEPSEEK = (
    _SYSTEM + "{% for message in messages %}{% if message.role == 'user' %}<|User|>{{ message.content }}"
    "{% elif message.role == 'assistant' %}<|Assistant|>{{ message.content.split('</think>')[-1] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
"""DeepSeek-R1: begins every answer with thoughts, drops old ones, and drops tool turns without a word."""

TEMPLATES = {
    "no-tools": NO_TOOLS,
    "hermes": HERMES,
    "qwen": QWEN,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "phi": PHI,
    "deepseek": DEEPSEEK,
}
