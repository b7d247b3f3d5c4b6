"""Ask llama.cpp for the tokens of many texts, so that tests can compare where it is not installed.

    pip install llama-cpp-python
    python scripts/llama_cpp_tokens.py                      # write tests/llama_cpp_tokens.json anew
    python scripts/llama_cpp_tokens.py FILE.gguf … --random 3000   # compare any files with it, and random texts too

The first trains small vocabularies in which spaces, digits and signs are merged with whatever stands beside them, so
that a text cut in another place becomes other tokens; makes GGUF files of them with each of the rules that the reader
knows; and writes down what llama.cpp makes of each text. Each file is also read and exported again, and llama.cpp must
give the same tokens for the export. The second prints a table and ends with code 1 if any tokens differ.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from otaro.bench.llama_cpp import LlamaCppTokenizer
from otaro.errors import OtaroError
from otaro.export.tokenizer import add_tokenizer
from otaro.sources.gguf import find_smollm2
from otaro.sources.gguf_file import GgufFile
from otaro.sources.gguf_tokenizer import read_tokenizer
from otaro.tokenizer import encode, load_tokenizer
from otaro.tokenizer.words import WORDS

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from vocabularies import EXPECTED, FOLDERS, load_expected, plain, write_folder, write_metadata, write_vocabulary

SPACE = "\u2581"
# fmt: off
TEXTS = [
    "", " ", "  ", "   ", " " * 4, " " * 5, " " * 7, " " * 8, " " * 9, " " * 16, " " * 17, " " * 31,
    " " * 33, " " * 64 + "x", "x" + " " * 300 + "y", "\t", "\t\t\t", "\n", "\n\n", "\n\n\n", "\n" * 20,
    "\r", "\r\n", "\r\r", "\n\r", "\n \n", " \n", "\n ", "\n  \n\n ", "  \n\t \n", " \n" * 5, "\t\n", "a\n",
    "a\n\n", "a\n b", "a \n", "a\t", "x\ty", "a\rb", "a\r\nb", "a \r\n b", "tab\tand\nnewline", "\t  \t",
    "  \t  ", "\v", "\f", "\x1c\x1d", " a", "  a", "   a", "    a", "     a", "a ", "a  ", "a   ", "a    ",
    "a  -  b", "Hello world", " Hello world", "  Hello  world  ", "Hello, world!", "Hello\nworld\n",
    "Hello\n\n\nworld", "  two leading", "trailing  ",
    "The quick brown fox jumps over the lazy dog. 0123456789\n" * 2, "aaaa", "a" * 17, "abababababab",
    "hahahaha", "nananana", "ionionion", "a", "A", "the the the", "don't", "DON'T",
    "I'll we've they're he'd I'm it's", "I'LL WE'VE THEY'RE HE'D I'M IT'S", "''s", "'S", "' s", "'re",
    "'RE're", "'", "' ", "'\u017f", "'\u017ft", "Mr. O'Neill's", "rock'n'roll", "'tis", "l'été d'hiver",
    "1", "12", "123", "1234", "12345", "123456", "1234567", "12345678901234567890", "3.14159",
    "1,234,567.89", "1e-10", "0x1F", "a1b2c3", "1a", "a1", "1 2 3", " 1", " 12 ", " 123 ", "2024-01-31",
    "12:34:56", "+1 (555) 123-4567", "$1.00", "1st 2nd 3rd", "٠١٢٣٤٥", "१२३४", "１２３4", "²³", "½", "Ⅷ",
    "①②", "1 000 000", "v1.2.3-beta", "你好世界", "你好，世界！", "こんにちは世界", "안녕하세요 세계",
    "ひらがなカタカナ漢字", "中文 English 混合 123", "中\n国", "中 国", "1中2", "a中b", "。、！？",
    "「引用」", "（括弧）", "ｶﾀｶﾅ", "ㄅㄆㄇ", "ㄱㄴ", "Ａｆｕｌｌ", "\U00020000", "مرحبا بالعالم",
    "שלום עולם", "مرحبا Hello שלום", "\u200frtl\u200eltr", "؟،؛ ۔", "हिन्दी में।", "ไทยภาษา", "ភាសាខ្មែរ",
    "Ελληνικά", "Русский язык", "приветМир", "ПРИВЕТ мир", "Ünïcödé", "ÉCOLEdéjàVu", "éÀ", "naïve café",
    "Straße", "İstanbul ıi", "ǅ", "ﬁ", "ᾳ", "𝒳𝓎", "𐐀𐐨", "e\u0301 combining", "e\u0301\u0323", "\u0301",
    "a\u0300\u0301\u0302b", "क्षि", "👍", "👍🏽", "👨‍👩‍👧‍👦", "🇩🇪🇫🇷", "🎉🎊🥳 party", "a👍b", "1👍",
    "👍 👍", "❤️", "☃", "✨ sparkles ✨", "…", "a…b", "—", "“quoted”", "«guillemets»", "¿qué?",
    "€100 £50 ¥20", "50% off", "#hashtag @user", "C++ / C#", "a/b/c", "C:\\Users\\name",
    "https://example.com/a?b=c&d=e#f", "user@example.com", '{"key": "value", "n": [1, 2, 3]}',
    '<html><body class="x">text</body></html>', "def f(x):\n    return x + 1\n",
    "if (a&&b||c) {\n\t\tfoo();\n}\n", "x+=1;y-=2", "if x==y and z!=w:",
    "~`!@#$%^&*()_+-=[]{}\\|;:'\",.<>/?", "...", "....", "-----", "=====", "a=b", "a =b", "____", "\\n\\t",
    "\\\\", "//// comment", "/* c */", "<!-- x -->", "camelCaseWord", "PascalCaseXML", "snake_case_word",
    "SCREAMING_SNAKE", "iPhone15Pro", "e.g., i.e.", "U.S.A.", "word.word", "word,word", "a-b", "a - b",
    "!!!", "?!?!\n\n", ".\n", "!\r\n", "x!/\n", "// \n", "\u00a0nbsp\u00a0x", "\u2003em\u2003space",
    "\u3000ideographic", "\u3000\u3000", "\u200bzero width", "\u2028line\u2029para", "\u0085next",
    "\ufeffbom", "\u202eoverride", "\ufffd", "\ue000private", "\U0010ffff", "x\u00adsoft", "ab\u200dcd",
    "№™®©", "→←", "∑∫√", "♥♦", "█▓", "┌─┐", "٪", "۝", "\x00", "nul\x00byte", "-\x03-", "\x01\x02\x7f",
    "\x1b[31mred", SPACE, SPACE * 2, f"a{SPACE}b", f" {SPACE} a", "<", ">", "<>", "<s", "s>", "<0x0A>",
    "<0x41>", "<p>", "[INST] hi [/INST]", "<s>", "</s>", "<s>hi</s>", "<unk> the", "<unk>", "<s> <s>",
    "a</s>b", "a </s> b", "hi</s>\n<s>there", " </s>x", "</s>  x", "  </s>  x  ", "<s>\n", "</s></s>",
    "<unk><unk>", "hi<s>", "<s> hi", "<<s>>", "<|im_start|>user\nhi<|im_end|>\n", "<|im_start|>",
    "<|im_end|>  x", "x<|im_end|>\n\n", "<|im_end|>\t\n x", "<tool>", "a<tool> b", "<tool>  <tool>",
    "<|endoftext|>", "a<|endoftext|> b", "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
    "<bos>x", "<unused7>", "<UNUSED>",
    "zebra", "a zebra quux", "приве", "a  12", "x   123  y", "lCa aBc", "a\u0301b e\u0301e", "x!\r\ny",
]
# fmt: on
CHAT = [
    {"role": "user", "content": "Hello there!  Who are you?"},
    {"role": "assistant", "content": "  I am a model.\nAsk me."},
    {"role": "user", "content": "12 + 30?"},
]
TEMPLATES = {
    "writes the beginning": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
    "does not": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
}


class Peer(LlamaCppTokenizer):
    """A vocabulary in llama.cpp, and conversations in it."""

    def chat(self, template: str) -> list[int]:
        """What the template writes, with the token for the beginning once where one is added to every text."""
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        ids = [self._api.llama_vocab_bos(self._tokens), self._api.llama_vocab_eos(self._tokens)]
        texts = [self._api.llama_vocab_get_text(self._tokens, index).decode() if index >= 0 else "" for index in ids]
        written = Jinja2ChatFormatter(template, eos_token=texts[1], bos_token=texts[0])(messages=CHAT).prompt
        if not self._api.llama_vocab_get_add_bos(self._tokens):
            return self.encode(written)
        return [ids[0], *self.encode(written.removeprefix(texts[0]))]


@contextmanager
def opened(path: Path) -> Iterator[Peer]:
    peer = Peer(path)
    try:
        yield peer
    finally:
        peer.close()


def train(texts: list[str], alphabet: list[str], merges: int) -> tuple[list[str], list[tuple[str, str]]]:
    """The characters and merges of a BPE vocabulary, without any cutting into words."""
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + merges, initial_alphabet=alphabet, limit_alphabet=len(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return [text for text in model["vocab"] if len(text) == 1], [tuple(merge) for merge in model["merges"]]


def byte_level(text: str) -> str:
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return "".join(piece for piece, _ in pieces)


def make_vocabularies() -> dict[str, dict[str, Any]]:
    kinds = gguf.TokenType
    corpus = TEXTS + [f"{one} {other}" for one, other in itertools.pairwise(TEXTS) if len(one) + len(other) < 60]
    characters, merges = train([byte_level(text) for text in corpus], sorted(pre_tokenizers.ByteLevel.alphabet()), 1200)
    # Words that no merges lead to: they are taken whole where merges are ignored, and never elsewhere.
    whole = [byte_level(text) for text in ("zebra", " quux", "12345", "приве")]
    special = {
        "<s>": kinds.CONTROL,
        "</s>": kinds.CONTROL,
        "<unk>": kinds.UNKNOWN,
        "<|im_start|>": kinds.CONTROL,
        "<|im_end|>": kinds.CONTROL,
        "<tool>": kinds.USER_DEFINED,
        "<|endoftext|>": kinds.CONTROL,
    }
    tokens = list(dict.fromkeys([*special, *characters, *(left + right for left, right in merges), *whole]))
    types = [special.get(token, kinds.NORMAL) for token in tokens]
    joined = [" ".join(merge) for merge in merges]
    byte_vocabulary = {"tokens": tokens, "types": types, "merges": joined}
    missing = {byte_level(character) for character in "\x03\x1b~"}
    kept = [index for index, token in enumerate(tokens) if not missing & set(token) or index < len(special)]
    few_bytes = {
        "tokens": [tokens[index] for index in kept],
        "types": [types[index] for index in kept],
        "merges": [merge for merge in joined if not missing & set(merge)],
    }

    texts = [SPACE + text.replace(" ", SPACE) for text in corpus]
    alphabet = sorted({character for character in "".join(TEXTS) if "!" <= character <= "~"} | set("éÉüßåя你好世界中▁"))
    characters, merges = train(texts, alphabet, 400)
    runs = {SPACE * length for length in range(2, 9)}
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    added = ["<|im_start|>", "<|im_end|>", "<tool>", "<|endoftext|>", "<UNUSED>"]
    turns = ["<start_of_turn>", "<end_of_turn>", "<unused7>"]
    made = dict.fromkeys(left + right for left, right in merges).keys() - runs.union(first, added, turns)
    made = sorted(made, key=[left + right for left, right in merges].index)
    tokens = [*first, *made, *sorted(runs), *characters]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(made))] + [-1e9] * len(runs) + [-2e9] * len(characters)
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL] + [kinds.BYTE] * 256
    types += [kinds.NORMAL] * (len(tokens) - len(types))
    plain = {
        "tokens": [*tokens, *added],
        "scores": [*scores, *([-1000.0] * len(added))],
        "types": [*types, *[kinds.CONTROL, kinds.CONTROL, kinds.USER_DEFINED, kinds.CONTROL, kinds.UNUSED]],
    }
    lines = ["\n\n", "\n\n\n", "\n" * 4, "  ", "   ", " " * 4, " " * 8]
    without_runs = [index for index, token in enumerate(tokens) if token not in runs]
    gemma = {
        "tokens": ["<pad>", "<eos>", "<bos>", *(tokens[index] for index in without_runs), *turns, *lines],
        "scores": [0.0] * 3 + [scores[index] for index in without_runs] + [-1000.0] * (len(turns) + len(lines)),
        "types": [kinds.CONTROL] * 3
        + [types[index] for index in without_runs]
        + [kinds.CONTROL] * len(turns)
        + [kinds.USER_DEFINED] * len(lines),
    }
    # Merges of lines stay within them; new lines have merges of their own.
    characters, merges = train([line for text in texts for line in text.split("\n")], alphabet, 400)
    merges += [("\n" * left, "\n" * right) for left, right in ((1, 1), (2, 2), (2, 1), (4, 4))]
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|tool_response>", "<|im_start|>", "<|im_end|>"]
    made = [left + right for left, right in merges if left + right not in special]
    tokens = list(dict.fromkeys([*special, *first[3:], "\n", *characters, *made, "<tool>", "</s>"]))
    named = {**dict.fromkeys(special, kinds.CONTROL), "<unk>": kinds.UNKNOWN, "<tool>": kinds.USER_DEFINED}
    named |= dict.fromkeys(first[3:], kinds.BYTE)
    lines_vocabulary = {
        "tokens": tokens,
        "types": [named.get(token, kinds.NORMAL) for token in tokens],
        "merges": [" ".join(merge) for merge in merges if "".join(merge) in tokens],
    }
    return {
        "byte-level": byte_vocabulary,
        "few-bytes": few_bytes,
        "sentencepiece": plain,
        "gemma": gemma,
        "lines": lines_vocabulary,
    }


def make_files() -> dict[str, dict[str, Any]]:
    """Files by name: a vocabulary and what else the metadata say."""
    ids = {"bos_token_id": 0, "eos_token_id": 1, "unknown_token_id": 2}
    files = {
        f"gpt2 {name}": {"vocabulary": "byte-level", "metadata": {"model": "gpt2", "pre": name, **ids}}
        for name in WORDS
    }
    files["gpt2 without a name"] = {"vocabulary": "byte-level", "metadata": {"model": "gpt2", **ids}}
    for name, pre, begin, end in (("begin and end", "qwen2", True, True), ("no begin", "llama-bpe", False, False)):
        flags = {"add_bos_token": begin, "add_eos_token": end}
        files[f"gpt2 {name}"] = {
            "vocabulary": "byte-level",
            "metadata": {"model": "gpt2", "pre": pre, **ids, **flags},
        }
    files["gpt2 few bytes"] = {"vocabulary": "few-bytes", "metadata": {"model": "gpt2", "pre": "gpt-2", **ids}}
    files["llama"] = {"vocabulary": "sentencepiece", "metadata": {"model": "llama"}}
    files["llama ends"] = {
        "vocabulary": "sentencepiece",
        "metadata": {"model": "llama", "add_bos_token": False, "add_eos_token": True},
    }
    files["llama no space"] = {"vocabulary": "sentencepiece", "metadata": {"model": "llama", "add_space_prefix": False}}
    files["llama phi-3"] = {"vocabulary": "sentencepiece", "metadata": {"model": "llama", "general.name": "Phi-3 mini"}}
    files["llama gemma"] = {
        "vocabulary": "gemma",
        "metadata": {
            "model": "llama",
            "bos_token_id": 2,
            "eos_token_id": 1,
            "unknown_token_id": 3,
            "padding_token_id": 0,
            "add_bos_token": True,
            "add_space_prefix": False,
        },
    }
    files["gemma4"] = {
        "vocabulary": "lines",
        "metadata": {"model": "gemma4", "bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3},
    }
    return files


def write_expected() -> None:
    vocabularies, files = make_vocabularies(), make_files()
    tables: dict[str, list[list[list[int]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, file) in enumerate(files.items()):
            path = Path(folder) / f"{number}.gguf"
            write_vocabulary(path, vocabularies[file["vocabulary"]], file["metadata"])
            ask(file, path, tables)
            check_export(name, path, Path(folder), len(vocabularies[file["vocabulary"]]["tokens"]))
    smollm2: dict[str, Any] = {"vocabulary": "smollm2"}
    ask(smollm2, find_smollm2(), tables)
    written = {
        "texts": TEXTS,
        "chat": CHAT,
        "templates": TEMPLATES,
        "vocabularies": vocabularies,
        "files": {**files, "smollm2": smollm2},
        "ids": tables,
    }
    lines = [
        f'"{key}": {json.dumps(value, ensure_ascii=False, separators=(",", ":"))}' for key, value in written.items()
    ]
    EXPECTED.write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")
    check_folders()
    print(f"{len(files) + 1} files, {len(TEXTS)} texts: {EXPECTED}")


def ask(file: dict[str, Any], path: Path, tables: dict[str, list[list[list[int]]]]) -> None:
    """Note llama.cpp's tokens: `choices` among the ways that the files of a vocabulary have to read a text."""
    table = tables.setdefault(file["vocabulary"], [[] for _ in TEXTS])
    file["choices"] = []
    with opened(path) as peer:
        for text, ways in zip(TEXTS, table, strict=True):
            ids = peer.encode(text)
            if ids not in ways:
                ways.append(ids)
            file["choices"].append(ways.index(ids))
        file["with_special"] = peer.encode("a", add_special=True)
        file["chats"] = {name: peer.chat(template) for name, template in TEMPLATES.items()}


def check_export(name: str, path: Path, folder: Path, size: int) -> None:
    """What is read from a file and exported again must be the same to llama.cpp."""
    if name in ("llama phi-3", "gemma4"):
        return  # known by the model's name alone; never exported
    place = folder / path.stem
    tokenizer = read_tokenizer(GgufFile(path)).tokenizer
    tokenizer.save_pretrained(place)
    again = folder / f"{path.stem}-again.gguf"
    write_metadata(again, lambda writer: add_tokenizer(writer, place, size))
    with opened(path) as one, opened(again) as other:
        for text in (*TEXTS, *random_texts(300, list(tokenizer.added_tokens_encoder))):
            for special in (False, True):
                if one.encode(text, add_special=special) != other.encode(text, add_special=special):
                    raise OtaroError(f"{name}: {text!r} has other tokens after export")


def check_folders() -> None:
    """Exports of folders whose tokenizer.json is of another making must be the same to llama.cpp, too."""
    expected = load_expected()
    for name, (_, _, exact) in FOLDERS.items():
        with tempfile.TemporaryDirectory() as place:
            folder = write_folder(Path(place), name, expected)
            path = folder / "exported.gguf"
            remarks = write_metadata(path, lambda writer: add_tokenizer(writer, folder, 2000))  # noqa: B023
            if bool(remarks) == exact:
                raise OtaroError(f"the export of {name} has the remarks {remarks}")
            tokenizer = load_tokenizer(folder)
            with opened(path) as peer:
                for text in (*TEXTS, *random_texts(300, list(tokenizer.added_tokens_encoder))):
                    for special in (False, True) if exact or plain(text, tokenizer) else ():
                        if encode(tokenizer, text, add_special_tokens=special) != peer.encode(
                            text, add_special=special
                        ):
                            raise OtaroError(f"{name}: {text!r} has other tokens after export")


def random_texts(count: int, special: list[str]) -> list[str]:
    """Texts of letters, signs, spaces, words and special tokens in any order, the same in every run."""
    chosen = random.Random(0)
    ranges = ((0, 0x600), (0x900, 0xA00), (0x1E00, 0x2100), (0x3000, 0x3100), (0x4E00, 0x4E80), (0xAC00, 0xAC40))
    ranges += ((0x1F300, 0x1F360), (0xFF00, 0xFF60))
    letters = [chr(code) for first, last in ranges for code in range(first, last)]
    letters = [letter for letter in letters if unicodedata.category(letter) not in ("Cn", "Cs")]
    words = [word for text in TEXTS if len(text) < 60 for word in text.split(" ")]
    alphabets = [
        [chr(code) for code in range(32, 127)],
        letters,
        [word + between for word in words for between in ("", " ", "  ", "\n", "'")],
        list(" \n\t\ra1'é▁-=."),
        [*special, " ", "\n", "x", SPACE, "<", ">", "  "],
        list("aeionrst ▁"),
    ]
    return ["".join(chosen.choices(chosen.choice(alphabets), k=chosen.randrange(1, 30))) for _ in range(count)]


def compare(paths: list[Path], random_count: int) -> int:
    """Print a table of how many texts have other tokens here than in llama.cpp; the number of them."""
    differing_files = 0
    print("| file | texts | differing |\n|---|---|---|")
    for path in paths:
        try:
            tokenizer = read_tokenizer(GgufFile(path)).tokenizer
        except OtaroError as error:
            print(f"| {path.name} | refused: {error} | |")
            continue
        special = list(tokenizer.added_tokens_encoder)[:40]
        texts = TEXTS + [f"hi {token} there\n{token}" for token in special] + random_texts(random_count, special)
        with opened(path) as peer:
            differing = [
                text
                for text in texts
                for adds in (False, True)
                if tokenizer(text, add_special_tokens=adds)["input_ids"] != peer.encode(text, add_special=adds)
            ]
        print(f"| {path.name} | {len(texts)} | {len(differing)} |")
        for text in differing[:5]:
            print(f"  {text!r}", file=sys.stderr)
        differing_files += bool(differing)
    return differing_files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--random", type=int, default=0, help="how many random texts to compare besides")
    arguments = parser.parse_args()
    if arguments.files:
        return min(1, compare(arguments.files, arguments.random))
    write_expected()
    return 0


if __name__ == "__main__":
    sys.exit(main())
