"""Programs of several languages as labelled trees, and their local structures."""

from langchain_rcr.programs.languages import LANGUAGES as LANGUAGES
from langchain_rcr.programs.languages import TOKENS as TOKENS
from langchain_rcr.programs.languages import ProgramParser as ProgramParser
from langchain_rcr.programs.languages import about as about
from langchain_rcr.programs.languages import get_parser as get_parser
from langchain_rcr.programs.languages import parse as parse
from langchain_rcr.programs.spec import ProgramSpec as ProgramSpec
from langchain_rcr.programs.spec import anonymize as anonymize
from langchain_rcr.programs.spec import implied_values as implied_values
from langchain_rcr.programs.tree import Tree as Tree
from langchain_rcr.programs.tree import local_structures as local_structures
