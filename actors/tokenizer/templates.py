"""Chat templates by name, for `--chat-template NAME`: jinja source, rendered by chat_template.py."""

from __future__ import annotations

_CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

_LLAMA_2 = """\
{%- set system = '' -%}
{%- set turns = messages -%}
{%- if messages[0].role == 'system' -%}
{%- set system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' -%}
{%- set turns = messages[1:] -%}
{%- endif -%}
{%- for message in turns -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('roles must alternate user, assistant, user, assistant, ...') }}
{%- endif -%}
{%- if message.role == 'user' -%}
{{ bos_token + '[INST] ' + (system if loop.first else '') + message.content.strip() + ' [/INST]' }}
{%- else -%}
{{ ' ' + message.content.strip() + ' ' + eos_token }}
{%- endif -%}
{%- endfor -%}
"""

_LLAMA_3 = """\
{{- bos_token -}}
{%- for message in messages -%}
{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content.strip() + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}
"""

_MISTRAL = """\
{{- bos_token -}}
{%- set system = '' -%}
{%- set turns = messages -%}
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content.strip() + '\\n\\n' -%}
{%- set turns = messages[1:] -%}
{%- endif -%}
{%- for message in turns -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('roles must alternate user, assistant, user, assistant, ...') }}
{%- endif -%}
{%- if message.role == 'user' -%}
{{ '[INST] ' + (system if loop.first else '') + message.content + ' [/INST]' }}
{%- else -%}
{{ ' ' + message.content.strip() + eos_token }}
{%- endif -%}
{%- endfor -%}
"""

_ZEPHYR = """\
{%- for message in messages -%}
{{ '<|' + message.role + '|>\\n' + message.content + eos_token + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}
"""

_VICUNA = """\
{{- bos_token -}}
{%- set system = 'A chat between a curious user and an artificial intelligence assistant. '
    + 'The assistant gives helpful, detailed, and polite answers to the user\\'s questions.' -%}
{%- set turns = messages -%}
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content.strip() -%}
{%- set turns = messages[1:] -%}
{%- endif -%}
{{- system -}}
{%- for message in turns -%}
{%- if message.role == 'user' -%}
{{ ' USER: ' + message.content.strip() }}
{%- else -%}
{{ ' ASSISTANT: ' + message.content.strip() + eos_token }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ ' ASSISTANT:' }}{%- endif -%}
"""

BUILTIN_TEMPLATES: dict[str, str] = {
    "chatml": _CHATML,
    "llama-2": _LLAMA_2,
    "llama-3": _LLAMA_3,
    "mistral": _MISTRAL,
    "zephyr": _ZEPHYR,
    "vicuna": _VICUNA,
}
