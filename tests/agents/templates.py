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
    "{% set ns = namespace(last='assistant') %}{% for message in messages %}"
    "{% if message.role in ['user', 'assistant'] and not message.tool_calls %}"
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

QWEN3 = (
    "{% if tools %}<|system|>\n" + _SYSTEM + "\n\n# Tools\n" + _TOOLS + "<|end|>\n"
    "{% elif messages[0].role == 'system' %}<|system|>\n" + _SYSTEM + "<|end|>\n{% endif %}"
    "{% set ns = namespace(last=0) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% if loop.first and message.role == 'system' %}{% elif message.role == 'tool' %}"
    "{% if loop.first or loop.previtem.role != 'tool' %}<|user|>{% endif %}"
    "\n<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|end|>\n{% endif %}"
    "{% else %}{% set content = message.content %}"
    "{% if message.role == 'assistant' and loop.index0 < ns.last %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "<|{{ message.role }}|>\n{{ content }}" + _CALLS + "<|end|>\n{% endif %}{% endfor %}" + _END
)
"""Qwen3: the system message, then tools in it; results side by side in one user turn; earlier thoughts dropped."""

LLAMA = (
    "<|system|>\n{% if tools %}Environment: ipython\n{% endif %}Cutting knowledge: 2023\n" + _SYSTEM + "<|end|>\n"
    "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% if tools %}{% if not rest %}{{ raise_exception('no user message to put the tools into') }}{% endif %}"
    "<|user|>\nCall one of these with JSON:\n" + _TOOLS + "{{ rest[0].content }}<|end|>\n"
    "{% set rest = rest[1:] %}{% endif %}"
    "{% for message in rest %}"
    "{% if message.role == 'tool' %}<|ipython|>\n{{ {'output': message.content} | tojson }}<|end|>\n"
    "{% elif message.tool_calls %}"
    "{% if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    '<|assistant|>\n{"name": "{{ message.tool_calls[0].function.name }}", '
    '"parameters": {{ message.tool_calls[0].function.arguments | tojson }}}<|end|>\n'
    "{% else %}<|{{ message.role }}|>\n{{ message.content }}<|end|>\n{% endif %}{% endfor %}" + _END
)
"""Llama 3.1: tools with the first turn, whosever it is; one call an answer, without its text."""

MISTRAL = (
    "{% if messages[0].role == 'system' %}"
    "{% set system = messages[0].content + '\\n\\n' %}{% set messages = messages[1:] %}"
    "{% else %}{% set system = '' %}{% endif %}"
    "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
    + _ALTERNATE
    + "{% for message in messages %}{% if message.role == 'user' %}"
    "{% if tools and message == asked[-1] %}[AVAILABLE_TOOLS]" + _TOOLS + "[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{% if loop.last %}{{ system }}{% endif %}{{ message.content }}[/INST]"
    "{% elif message.role == 'tool' %}"
    "{% if message.tool_call_id | length != 9 %}{{ raise_exception('call ids have nine letters') }}{% endif %}"
    "[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]"
    "{% elif message.tool_calls %}"
    "[TOOL_CALLS][{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}]</s>"
    "{% elif message.role == 'assistant' %}{{ message.content }}</s>"
    "{% else %}{{ raise_exception('only user, assistant and tool') }}{% endif %}{% endfor %}"
)
"""Mistral: the system message in the last user turn if that comes last, tools before each turn like the last user turn,
strict alternation, ids of nine letters, calls without their text."""

GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + _ALTERNATE
    + "{% for message in messages %}"
    "{% if message.role not in ['user', 'assistant'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "<start_of_turn>{{ 'model' if message.role == 'assistant' else 'user' }}\n"
    "{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
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
    "{% elif message.role == 'assistant' %}<|Assistant|>{{ message.content.split('</think>')[-1] }}<|end|>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
"""DeepSeek-R1: begins every answer with thoughts, drops old ones, and drops tool turns without a word."""

DEEPSEEK_V3 = (
    _SYSTEM + "{% for message in messages %}{% if message.role == 'user' %}<|User|>{{ message.content }}"
    "{% elif message.tool_calls %}<|Assistant|>{{ message.content }}{% for call in message.tool_calls %}"
    "{{ '<|call|>' + call.function.name + '<|sep|>' + call.function.arguments + '<|call end|>' }}{% endfor %}<|end|>"
    "{% elif message.role == 'assistant' %}<|Assistant|>{{ message.content }}<|end|>"
    "{% elif message.role == 'tool' %}<|output|>{{ message.content }}<|output end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role == 'user' %}<|Assistant|>{% endif %}"
)
"""DeepSeek V3: arguments of calls as JSON text, no tools."""

GEMMA4 = (
    "<|turn>system\n" + _SYSTEM + "{% for tool in tools or [] %}<|tool>{{ tool | tojson }}<tool|>{% endfor %}<turn|>\n"
    "{% for message in messages %}{% if message.role == 'user' %}<|turn>user\n{{ message.content | trim }}<turn|>\n"
    "{% elif message.role == 'assistant' %}<|turn>model\n{% for call in message.tool_calls or [] %}"
    "<|tool_call>call:{{ call.function.name }}{{ call.function.arguments | tojson }}<tool_call|>"
    "{% for answer in messages %}{% if answer.tool_call_id == call.id %}"
    "<|tool_response>{{ answer.content }}<tool_response|>{% endif %}{% endfor %}{% endfor %}"
    "{{ message.content | trim }}<turn|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
"""Gemma 4: tools at the end of the system turn; results beside their calls, so that one without a call is dropped."""

TEMPLATES = {
    "no-tools": NO_TOOLS,
    "hermes": HERMES,
    "qwen": QWEN,
    "qwen3": QWEN3,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "gemma4": GEMMA4,
    "phi": PHI,
    "deepseek": DEEPSEEK,
    "deepseek-v3": DEEPSEEK_V3,
}
