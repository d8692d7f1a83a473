"""The content of a SQuAD file: three questions about two pets, one of them without an answer."""

CONTEXT = "The cat sat on a mat in Rome. The dog, a beagle, lay in Rome too."


def question(id, *answers):
    found = [{"text": text, "answer_start": CONTEXT.find(text)} for text in answers]
    return {"id": id, "question": f"{id}?", "answers": found, "is_impossible": not answers}


def dataset(*questions):
    paragraph = {"context": CONTEXT, "qas": list(questions)}
    return {"version": "v2.0", "data": [{"title": "Pets", "paragraphs": [paragraph]}]}


ROWS = question("where", "on a mat", "mat"), question("which", "a beagle"), question("why")
PETS = dataset(*ROWS)
