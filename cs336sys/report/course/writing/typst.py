"""The write-up as Typst."""

from cs336sys.report.course.document import Block, Document
from cs336sys.report.course.writing.parts import DrawnPicture, absent_words, heading, introduction, is_long
from cs336sys.report.rendering import render, typst_string

_TYPST_HEAD = """#set page(margin: 2cm, numbering: "1")
#set text(size: 10pt)
#set par(justify: false)
#show figure: set block(breakable: true)
#show table: set text(size: 6.5pt)
"""


def _typst(text: str) -> str:
    pieces = enumerate(text.split("`"))
    return " ".join(
        f"#raw({typst_string(piece)})" if number % 2 else f"#text({typst_string(piece)})"
        for number, piece in pieces
        if piece
    )


def _typst_sentences(block: Block) -> str:
    if not is_long(block):
        return _typst(" ".join(block.sentences))
    return "\n".join(f"- {_typst(sentence)}" for sentence in block.sentences)


def to_typst(document: Document, draw: DrawnPicture) -> str:
    """A whole file for typst; pictures stand in files beside it."""
    lines = [_TYPST_HEAD + f"= #text({typst_string(document.title)})", *map(_typst, introduction(document))]
    for problem, sections in document.problems:
        lines.append(f"== #text({typst_string(f'{problem.name}: {problem.title}')})")
        for section in sections:
            lines += [f"=== #text({typst_string(heading(problem, section))})"] if section.letter else []
            for block in section.blocks:
                lines += [f"*#text({typst_string(block.machine)})*"] if block.machine else []
                lines += [f"#raw({typst_string(line)})" for line in block.commands]
                lines += [_typst_sentences(block), *map(_typst, block.missing)]
                lines += [render([table], "typst").strip() for table in block.tables]
                lines += [
                    f"#image({typst_string(path)}, width: 100%)"
                    for picture in block.pictures
                    if (path := draw(picture))
                ]
            if not section.blocks:
                lines.append(_typst(absent_words(section)))
    lines += map(_typst, document.faults)
    return "\n\n".join(lines) + "\n"
